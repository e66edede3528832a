// SPDX-License-Identifier: BSD-3-Clause
// C++ owners for the C handles: each gives back what it holds, and moves.
#include <ucx_memh/pyapi.h> // first, as Python.h wants it

#include <array>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace
{

const ucxm_api_t *ucxm;

void check(ucxm_status_t status, const ucxm_error_t &error)
{
    if (status != UCXM_OK)
        throw std::runtime_error(std::string(ucxm->status_name(status)) + ": " + error.text);
}

struct Release {
    void operator()(ucxm_memh_t *memh) const { ucxm->memh_release(memh); }
    void operator()(ucxm_rkey_t *rkey) const { ucxm->rkey_release(rkey); }
};
using Memh = std::unique_ptr<ucxm_memh_t, Release>;
using Rkey = std::unique_ptr<ucxm_rkey_t, Release>;

Memh reg(ucxm_md_t *md, std::vector<unsigned char> &memory)
{
    ucxm_reg_params_t params{};
    ucxm_memh_t *memh;
    ucxm_error_t error{};

    params.struct_size = sizeof(params);
    params.address = reinterpret_cast<uintptr_t>(memory.data());
    params.length = memory.size();
    params.flags = UCXM_MEM_ACCESS_RMA;
    check(ucxm->mem_reg(md, &params, &memh, &error), error);
    return Memh(memh);
}

Memh derive(const Memh &base, uint64_t offset, uint64_t length)
{
    ucxm_memh_t *memh;
    ucxm_error_t error{};

    check(ucxm->mem_derive(base.get(), offset, length, UCXM_RIGHTS_ALL, nullptr, &memh, &error),
          error);
    return Memh(memh);
}

std::vector<unsigned char> pack(const Memh &memh)
{
    std::size_t length = 0;
    ucxm_error_t error{};

    check(ucxm->mkey_pack(memh.get(), 0, nullptr, &length, &error), error);
    std::vector<unsigned char> key(length);
    check(ucxm->mkey_pack(memh.get(), 0, key.data(), &length, &error), error);
    return key;
}

Rkey unpack(ucxm_md_t *md, const std::vector<unsigned char> &key)
{
    ucxm_rkey_t *rkey;
    ucxm_error_t error{};

    check(ucxm->rkey_unpack(md, key.data(), key.size(), &rkey, &error), error);
    return Rkey(rkey);
}

} // namespace

// With the GIL.  "" or what went wrong.
extern "C" const char *cpp_run(PyObject *python_md)
{
    static std::string said;
    ucxm_error_t error{};

    ucxm = ucxm_import_api();
    const ucxm_python_t *objects = ucxm_import_python();
    if (ucxm == nullptr || objects == nullptr)
        return "no table";
    ucxm_md_t *md = objects->md(python_md);
    try {
        std::vector<unsigned char> memory(4096);
        Memh base = reg(md, memory);
        Memh window = derive(base, 64, 64);
        Rkey rkey = unpack(md, pack(window));
        Memh moved = std::move(window);
        check(ucxm->mem_invalidate(moved.get(), 0, nullptr, &error), error);
        try {
            pack(moved);
            return "a revoked handle was packed";
        } catch (const std::runtime_error &refused) {
            if (std::strncmp(refused.what(), "REVOKED", 7) != 0)
                throw;
        }
        derive(base, 4096, 1); // past the end: this one throws, and all of the above goes
        return "derived past the end";
    } catch (const std::runtime_error &refused) {
        said = refused.what();
    }
    return said.c_str();
}
