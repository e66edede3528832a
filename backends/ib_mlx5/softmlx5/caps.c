/* SPDX-License-Identifier: BSD-3-Clause */
/* QUERY_HCA_CAP: the capability fields that the device knows, by their PRM names. */
#include "internal.h"

struct sm_limits sm_limits;

static struct cap {
    const char *name;
    unsigned type, off, width;
    uint64_t dflt;
    _Atomic uint32_t *limit;
    _Atomic uint64_t value;
    _Atomic bool changed;
} caps[] = {
    {"vhca_id", 0, 0x30, 16, 1, 0, 0, 0},
    {"log_max_qp", 0, 0x9b, 5, 17, 0, 0, 0},
    {"ece", 0, 0xa3, 1, 0, 0, 0, 0},
    {"log_max_mkey", 0, 0xea, 6, SM_MKEY_BITS, &sm_limits.log_max_mkey, 0, 0},
    {"max_indirection", 0, 0x100, 8, 4, &sm_limits.max_indirection, 0, 0},
    {"fixed_buffer_size", 0, 0x108, 1, 1, &sm_limits.ksm, 0, 0},
    {"log_max_mrw_sz", 0, 0x109, 7, 48, 0, 0, 0},
    {"umr_extended_translation_offset", 0, 0x118, 1, 0, 0, 0, 0},
    {"null_mkey", 0, 0x119, 1, 0, 0, 0, 0},
    {"log_max_klm_list_size", 0, 0x11a, 6, 16, &sm_limits.log_max_klm, 0, 0},
    {"log_max_ra_req_dc", 0, 0x12a, 6, 0, 0, 0, 0},
    {"ooo_sl_mask", 0, 0x138, 1, 0, 0, 0, 0},
    {"device_memory", 0, 0x1a8, 1, 0, 0, 0, 0},
    {"log_max_msg", 0, 0x1c3, 5, 30, &sm_limits.log_max_msg, 0, 0},
    {"cqe_version", 0, 0x1fc, 4, 1, 0, 0, 0},
    {"compact_address_vector", 0, 0x200, 1, 1, 0, 0, 0},
    {"umr_modify_entity_size_disabled", 0, 0x207, 1, 0, 0, 0, 0},
    {"umr_modify_atomic_disabled", 0, 0x208, 1, 0, &sm_limits.umr_atomic_off, 0, 0},
    {"umr_indirect_mkey_disabled", 0, 0x209, 1, 0, &sm_limits.umr_indirect_off, 0, 0},
    {"umr_fence", 0, 0x20a, 2, 0, 0, 0, 0},
    {"dct", 0, 0x21a, 1, 0, 0, 0, 0},
    {"atomic", 0, 0x21e, 1, 1, &sm_limits.atomic, 0, 0},
    {"pg", 0, 0x227, 1, 0, 0, 0, 0},
    {"lag_dct", 0, 0x276, 2, 0, 0, 0, 0},
    {"num_lag_ports", 0, 0x27c, 4, 0, 0, 0, 0},
    {"log_max_rmp", 0, 0x383, 5, 0, 0, 0, 0},
    {"mkc_order_write_after_write_ro_only", 0, 0x3a9, 1, 0, 0, 0, 0},
    {"general_obj_types", 0, 0x400, 64, 0, 0, 0, 0},
    {"crossing_vhca_mkey", 0, 0x5b2, 1, 0, 0, 0, 0},
    {"introspection_mkey_access_allowed", 0x20, 0x91, 1, 0, 0, 0, 0},
    {"cross_vhca_object_to_object_supported", 0x20, 0xe0, 32, 0, 0, 0, 0},
    {"allowed_object_for_other_vhca_access", 0x20, 0x100, 64, 0, 0, 0, 0},
    {"mkey_by_name_reserve", 0x20, 0x3c0, 1, 0, 0, 0, 0},
    {"mkey_by_name_reserve_log_size", 0x20, 0x3c2, 6, 0, 0, 0, 0},
    {"mkey_by_name_reserve_base", 0x20, 0x3c8, 24, 0, 0, 0, 0},
    /* The requester's byte order is the host's: plain verbs atomics, as on a real x86 host. */
    {"atomic_req_8B_endianness_mode", 3, 0x40, 2, 0, 0, 0, 0},
    {"atomic_operations", 3, 0x90, 16, 3, 0, 0, 0},
    {"atomic_size_qp", 3, 0xb0, 16, 8, 0, 0, 0},
    {"atomic_size_dc", 3, 0xd0, 16, 0, 0, 0, 0},
    {"fetch_add_pci", 3, 0x280, 16, 0, 0, 0, 0},
    {"swap_pci", 3, 0x290, 16, 0, 0, 0, 0},
    {"compare_swap_pci", 3, 0x2a0, 16, 0, 0, 0, 0},
    {"mem_page_fault", 2, 0x600, 1, 0, 0, 0, 0},
};

static uint64_t cap_value(const struct cap *c)
{
    return atomic_load(&c->changed) ? atomic_load(&c->value) : c->dflt;
}

static void limit_update(const struct cap *c)
{
    if (c->limit)
        atomic_store(c->limit, (uint32_t)cap_value(c));
}

/* Before anybody can look: a capability's default must hold for its limit, too. */
__attribute__((constructor)) static void limits_init(void)
{
    for (size_t i = 0; i < ARRAY_SIZE(caps); i++)
        limit_update(&caps[i]);
}

static struct cap *cap_find(const char *name)
{
    for (size_t i = 0; i < ARRAY_SIZE(caps); i++) {
        if (!strcmp(caps[i].name, name))
            return &caps[i];
    }
    return NULL;
}

bool sm_caps_fill(unsigned type, uint8_t *area)
{
    if (type != SM_CAP_GENERAL && type != SM_CAP_ODP && type != SM_CAP_ATOMIC &&
        type != SM_CAP_GENERAL_2)
        return false;
    memset(area, 0, SM_CAP_BYTES);
    for (size_t i = 0; i < ARRAY_SIZE(caps); i++) {
        if (caps[i].type == type)
            sm_bits_set(area, caps[i].off, caps[i].width, cap_value(&caps[i]));
    }
    return true;
}

int sm_caps_set(const char *name, const char *value)
{
    struct cap *c = cap_find(name);
    char *end;
    uint64_t v;

    if (!c)
        return ENOENT;
    if (!strcmp(value, "default")) {
        atomic_store(&c->changed, false);
    } else {
        errno = 0;
        v = strtoull(value, &end, 0);
        if (*value < '0' || *value > '9' || *end || errno || (c->width < 64 && v >> c->width))
            return EINVAL;
        atomic_store(&c->value, v);
        atomic_store(&c->changed, true);
    }
    limit_update(c);
    return 0;
}

uint64_t sm_caps_get(const char *name)
{
    const struct cap *c = cap_find(name);

    return c ? cap_value(c) : 0;
}
