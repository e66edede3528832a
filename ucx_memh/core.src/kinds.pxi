# SPDX-License-Identifier: BSD-3-Clause
# The key kinds, in one table; and which of them a packed key names, by kind of handle.

cdef enum:
    MADE_BY_REG = 0      # the registration brings it
    MADE_BY_PACK = 1     # the first pack that names it makes it
    GONE_WITH_DEREG = 0  # revocable only by deregistering the region
    GONE_ALONE = 1       # revocable by invalidate, on its own

cdef struct kind_t:
    const char *name
    uint64_t needs       # capability of the Md; 0: none
    uint64_t rights      # remote rights that such a key can carry
    int made
    int gone             # what revokes it
    const char *destroyed

cdef kind_t[4] KINDS
KINDS[UCXM_KEY_DIRECT] = kind_t(
    "direct", 0, UCXM_MEM_ACCESS_REMOTE,
    MADE_BY_REG, GONE_WITH_DEREG, "mem_dereg")
KINDS[UCXM_KEY_INDIRECT] = kind_t(
    "indirect", UCXM_MD_FLAG_INVALIDATE_RMA,
    UCXM_MEM_ACCESS_REMOTE_PUT | UCXM_MEM_ACCESS_REMOTE_GET,
    MADE_BY_PACK, GONE_WITH_DEREG, "key_destroy, then mem_dereg")
KINDS[UCXM_KEY_ATOMIC] = kind_t(
    "atomic", UCXM_MD_FLAG_INVALIDATE_AMO, UCXM_MEM_ACCESS_REMOTE_ATOMIC,
    MADE_BY_PACK, GONE_WITH_DEREG, "key_destroy, then mem_dereg")
KINDS[UCXM_KEY_DERIVED] = kind_t(
    "derived", UCXM_MD_FLAG_REG_DERIVED, UCXM_MEM_ACCESS_REMOTE,
    MADE_BY_PACK, GONE_ALONE, "key_destroy")

cdef enum:
    NO_SLOT = 255

# Pack flags INVALIDATE_RMA and INVALIDATE_AMO choose a column 0..3.
cdef struct choice_t:
    uint8_t rma_slot
    uint8_t rma_kind
    uint8_t atomic_slot  # NO_SLOT: one key serves both
    uint8_t atomic_kind
    uint8_t same_as      # the column whose bytes these are

cdef struct plan_t:
    choice_t choice[4]
    uint16_t key_flags

cdef plan_t BASE_PLAN
BASE_PLAN.key_flags = 0
BASE_PLAN.choice[0] = choice_t(UCXM_SLOT_PLAIN, UCXM_KEY_DIRECT, NO_SLOT, 0, 0)
BASE_PLAN.choice[1] = choice_t(UCXM_SLOT_INDIRECT, UCXM_KEY_INDIRECT, NO_SLOT, 0, 1)
BASE_PLAN.choice[2] = choice_t(UCXM_SLOT_PLAIN, UCXM_KEY_DIRECT,
                               UCXM_SLOT_ATOMIC, UCXM_KEY_ATOMIC, 2)
BASE_PLAN.choice[3] = choice_t(UCXM_SLOT_INDIRECT, UCXM_KEY_INDIRECT,
                               UCXM_SLOT_ATOMIC, UCXM_KEY_ATOMIC, 3)

# A derived handle has one key of its own, whatever it is packed for.
cdef plan_t DERIVED_PLAN
DERIVED_PLAN.key_flags = UCXM_KEY_FLAG_REVOCABLE
cdef int _column
for _column in range(4):
    DERIVED_PLAN.choice[_column] = choice_t(UCXM_SLOT_PLAIN, UCXM_KEY_DERIVED, NO_SLOT, 0, 0)


def key_kinds():
    """The key-kind table, a dict for each kind: what it needs, who makes and who destroys it."""
    return [
        {
            "kind": KINDS[i].name.decode(),
            "made": ("mem_reg", "first mkey_pack")[KINDS[i].made],
            "needs": _flags.MdFlag(KINDS[i].needs),
            "rights": _flags.MemFlag(KINDS[i].rights),
            "revocable_by": ("dereg", "invalidate")[KINDS[i].gone],
            "destroyed": KINDS[i].destroyed.decode(),
        }
        for i in range(<int>UCXM_KEY_KINDS)
    ]
