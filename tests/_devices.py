# SPDX-License-Identifier: BSD-3-Clause
"""What differs between the RDMA devices that the same tests run on."""

import ctypes
from contextlib import AbstractContextManager

import ucx_memh as um
from _rawqp import software_library
from _sides import Wc, Where, opened
from ucx_memh import PackFlag

PLAIN, RMA, AMO = PackFlag.NONE, PackFlag.INVALIDATE_RMA, PackFlag.INVALIDATE_AMO


class Control:
    """The software device's control surface, for what no driver could ask or do."""

    LIVE = "mkeys mrs qps cqs pds contexts".split()

    def __init__(self) -> None:
        self._lib = ctypes.CDLL(software_library())
        self._lib.softmlx5_stat.restype = ctypes.c_uint64

    def stat(self, name: str) -> int:
        value = self._lib.softmlx5_stat(name.encode())
        assert value != 2**64 - 1, f"no counter {name}"
        return value

    def set(self, name: str, value: object) -> None:
        assert self._lib.softmlx5_set(name.encode(), str(value).encode()) == 0, (name, value)

    def fault(self, text: str) -> None:
        assert self._lib.softmlx5_fault(text.encode()) == 0, text

    def live(self) -> dict[str, int]:
        """What the device holds for this process."""
        return {name: self.stat(f"{name}.live") for name in self.LIVE}

    def defaults(self) -> None:
        """Settings that tests leave behind, as they were."""
        self.fault("")
        self.set("gate", "open")
        self.set("path", "auto")
        self.set("index_policy", "lowest")


class Device:
    """An adapter and the component that drives it."""

    where = Where()
    made = "device.create_mkey"  # the counter of what makes a native key
    ended = "device.destroy_mkey"
    base_keys = True  # a base has revocable keys, too
    keeps_range = True  # it refuses what is outside of a derived key's range
    direct_atomics = True  # it wants the registration's own atomic right below a derived key's
    slow = False  # it is emulated

    def opened(self, **config: object) -> AbstractContextManager[um.Md]:
        return opened(self.where, **config)

    def live(self) -> dict[str, int]:
        """What the device holds for us."""
        raise NotImplementedError

    def keys(self, md: um.Md) -> int:
        """How many native keys there are, but for a constant."""
        return md.stats()[self.made] - md.stats()[self.ended]

    def regions(self, md: um.Md) -> int:
        """How many memory regions there are, but for a constant."""
        return md.stats()["device.reg_mr"] - md.stats()["device.dereg_mr"]

    def restore(self) -> None:
        """Undo what a test has set."""

    def flows(self, md: um.Md) -> int:
        """How many connections it still has, if it tells: a closed one goes by and by."""
        return 0

    def moved(self) -> int:
        """A count that grows while data leaves or arrives here."""
        raise NotImplementedError

    def times(self, count: int) -> int:
        """As often as that, or a tenth of it where everything is slow."""
        return count // 10 if self.slow else count

    @property
    def outside(self) -> Wc:
        """What comes of an access beyond a derived key's range, but within the registration."""
        return Wc.REM_ACCESS_ERR if self.keeps_range else Wc.SUCCESS

    @property
    def ways(self) -> list[PackFlag]:
        """The ways to pack a base."""
        return [PLAIN, RMA, AMO, RMA | AMO] if self.base_keys else [PLAIN]


class SoftwareDevice(Device):
    """softmlx5, which also says itself what it holds."""

    def __init__(self) -> None:
        self.soft = Control()

    def live(self) -> dict[str, int]:
        return self.soft.live()

    def restore(self) -> None:
        self.soft.defaults()

    def keys(self, md: um.Md) -> int:
        # Windows and regions have keys of their own there; and what is free is nobody's.
        stats = md.stats()
        unused = stats.get("device.pool_free", 0) + stats.get("device.pool_resting", 0)
        return self.soft.stat("mkeys.live") - unused

    def regions(self, md: um.Md) -> int:
        return self.soft.stat("mrs.live")

    def flows(self, md: um.Md) -> int:
        own = 2 if md.stats()["device.control_qp"] else 0  # that queue pair's with itself
        return self.soft.stat("flows.live") - own

    def moved(self) -> int:
        return self.soft.stat("chunks")

    def endings(self, md: um.Md) -> int:
        """How many native keys the device was told to end."""
        return self.soft.stat("cmd.destroy_mkey") + self.soft.stat("wr.local_inv")
