# SPDX-License-Identifier: BSD-3-Clause
# Which handles cover an address: a treap by address for each kind, in the handles' own books, and
# in each node how far its subtree reaches.  It is made by the first search and kept from then on;
# who never searches pays nothing.  The Md's tree_lock is held throughout.

cdef inline uint64_t index_end(ucxm_memh_t *memh) noexcept nogil:
    return ucxm_memh_own(memh).address + ucxm_memh_own(memh).length


cdef inline uint64_t index_weight(const ucxm_memh_t *memh) noexcept nogil:
    """As good as random: key ids, which are never used again, well mixed."""
    cdef uint64_t mixed = memh.id.key_id * <uint64_t>0x9e3779b97f4a7c15
    return (mixed ^ mixed >> 32) * <uint64_t>0xd6e8feb86659fd93


cdef inline bint index_before(const ucxm_memh_t *one, const ucxm_memh_t *other) noexcept nogil:
    cdef uint64_t a = ucxm_memh_own(one).address
    cdef uint64_t b = ucxm_memh_own(other).address
    return a < b or a == b and one.id.key_id < other.id.key_id


cdef inline void index_update(ucxm_memh_t *memh) noexcept nogil:
    cdef books_t *books = books_of(memh)
    books.reach = index_end(memh)
    if books.left != NULL:
        books.reach = max(books.reach, books_of(books.left).reach)
    if books.right != NULL:
        books.reach = max(books.reach, books_of(books.right).reach)


cdef void index_split(ucxm_memh_t *root, const ucxm_memh_t *at, ucxm_memh_t **left,
                      ucxm_memh_t **right) noexcept nogil:
    """All before `at` to the left, the rest to the right."""
    if root == NULL:
        left[0] = NULL
        right[0] = NULL
        return
    if index_before(root, at):
        left[0] = root
        index_split(books_of(root).right, at, &books_of(root).right, right)
    else:
        right[0] = root
        index_split(books_of(root).left, at, left, &books_of(root).left)
    index_update(root)


cdef void index_insert(ucxm_memh_t **root, ucxm_memh_t *memh) noexcept nogil:
    cdef books_t *books = books_of(memh)
    if root[0] != NULL and index_weight(root[0]) >= index_weight(memh):
        if index_before(memh, root[0]):
            index_insert(&books_of(root[0]).left, memh)
        else:
            index_insert(&books_of(root[0]).right, memh)
    else:
        index_split(root[0], memh, &books.left, &books.right)
        root[0] = memh
    index_update(root[0])


cdef ucxm_memh_t *index_merge(ucxm_memh_t *left, ucxm_memh_t *right) noexcept nogil:
    """One tree of two, all of the left before all of the right."""
    cdef ucxm_memh_t *root
    if left == NULL or right == NULL:
        return right if left == NULL else left
    if index_weight(left) >= index_weight(right):
        root = left
        books_of(root).right = index_merge(books_of(root).right, right)
    else:
        root = right
        books_of(root).left = index_merge(left, books_of(root).left)
    index_update(root)
    return root


cdef void index_erase(ucxm_memh_t **root, ucxm_memh_t *memh) noexcept nogil:
    if root[0] == memh:
        root[0] = index_merge(books_of(memh).left, books_of(memh).right)
        return
    if index_before(memh, root[0]):
        index_erase(&books_of(root[0]).left, memh)
    else:
        index_erase(&books_of(root[0]).right, memh)
    index_update(root[0])


cdef inline ucxm_memh_t **index_root(md_t *md, const ucxm_memh_t *memh) noexcept nogil:
    return &md.index[memh.id.parent != NULL]


cdef void index_cover(ucxm_memh_t *root, uint64_t address, uint64_t length, ucxm_memh_t **found,
                      size_t room, size_t *count) noexcept nogil:
    """Those in this subtree that cover address .. +length, in order; as many as there is room
    for, and how many there are."""
    cdef books_t *books
    while root != NULL and books_of(root).reach - address >= length and (
            books_of(root).reach >= address):
        books = books_of(root)
        index_cover(books.left, address, length, found, room, count)
        if ucxm_memh_own(root).address > address:
            return
        if load32(&root.id.state) == UCXM_MEMH_LIVE and load32(&books.pending) == 0 and inside(
                address, length, ucxm_memh_own(root).address, ucxm_memh_own(root).length):
            if count[0] < room:
                found[count[0]] = root
            count[0] += 1
        root = books.right
