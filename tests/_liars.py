# SPDX-License-Identifier: BSD-3-Clause
"""Backends that lie, one lie each, and the conformance kit on them: test_kit_liars.py runs this.

Each is a backend that a hurried author might write, and passes all tests of the kit but those
that are named beside it.
"""

import os
import time
from itertools import count

import pytest

import ucx_memh as um
from ucx_memh import Enforcement, EnforcementRow, EnforcementTable, MemFlag
from ucx_memh.python_backend import KeyKind, OpKind, bind
from ucx_memh.testing import MdSuite, PythonDevice, open_fake
from ucx_memh.testing._python import FLAGS, PAYLOAD

pytestmark = pytest.mark.usefixtures("frozen_heap")

ENFORCED = EnforcementRow(*[Enforcement.ENFORCED] * 3)
SUITES = {}  # class name: the tests that must fail


def bound(device, **changes):
    """An Md of a device that is written in Python, and of what its backend states."""
    stated = dict(rkey_packed_size=PAYLOAD.size, rkey_raw_size=PAYLOAD.size, quarantine=64)
    return bind(
        device,
        component="liar",
        md_name="liar0",
        flags=FLAGS,
        software=True,
        enforcement=EnforcementTable(ENFORCED, ENFORCED, ENFORCED),
        **stated | changes,
    )


class Liar(MdSuite):
    """The kit, on a device that keeps to all rules until a subclass changes that."""

    wait = 1
    cycles = 10
    stream = 64 << 10
    device = PythonDevice
    stated = {}

    @pytest.fixture
    def md(self):
        self.made = self.device()
        md = bound(self.made, **self.stated)
        yield md
        md.close(force=True)

    @pytest.fixture
    def refuse(self):
        return lambda op: self.made.faults.setdefault(op, []).append(um.DeviceError("busy"))


def caught_by(*tests):
    """The class is a suite on a device that lies, and these tests find out."""

    def register(suite):
        SUITES[suite.__name__] = set(tests)
        return suite

    return register


class Changes(PythonDevice):
    """A device whose keys are not what was asked for: what changed() makes of that."""

    def key_create(self, memh, key):
        value = super().key_create(memh, key)
        self.keys[value] = self.changed(memh, *self.keys[value])
        return value


@caught_by()
class TestHonest(Liar):
    gauges = ("device.python_keys",)


@caught_by("test_revocation_is_as_claimed")
class TestARevokedKeyWorks(Liar):
    class device(PythonDevice):
        def key_destroy(self, memh, key, done):
            self._enter("key_destroy")


@caught_by("test_revocation_is_as_claimed")
class TestOneRevocationTakesTheNextKeyAlong(Liar):
    class device(PythonDevice):
        def key_destroy(self, memh, key, done):
            super().key_destroy(memh, key, done)
            address, length, _, end = self.keys.get(key.value + 1, (0, 0, 0, None))
            if length == 64 << 10:  # which no other test's handles have
                self.keys[key.value + 1] = (address, length, MemFlag(0), end)


@caught_by("test_ranges_are_kept_as_claimed")
class TestDeriveIgnoresTheRange(Liar):
    class device(Changes):
        def changed(self, memh, address, length, rights, end):
            return memh.reg.address, memh.reg.length, rights, end


@caught_by("test_ranges_are_kept_as_claimed")
class TestTheLastByteIsNotLookedAt(Liar):
    class device(Changes):
        def changed(self, memh, address, length, rights, end):
            return address, length + 1, rights, end


@caught_by("test_rights_are_kept_as_claimed")
class TestAnyKeyGivesAllRights(Liar):
    class device(Changes):
        def changed(self, memh, address, length, rights, end):
            return address, length, MemFlag.ACCESS_REMOTE, end


@caught_by("test_a_bound_key_serves_its_endpoint_only")
class TestABoundKeyServesEverybody(Liar):
    class device(Changes):
        def changed(self, memh, address, length, rights, end):
            return address, length, rights, None


@caught_by("test_packs_only_what_is_declared")
class TestPacksTooMuch(Liar):
    class device(PythonDevice):
        def mkey_pack(self, memh, rma, atomic):
            more = bytes(4) if rma.kind is KeyKind.INDIRECT else b""
            return super().mkey_pack(memh, rma, atomic) + more


@caught_by("test_a_payload_of_another_size_is_refused", "test_raw_keys")
class TestUnpacksAnything(Liar):
    class device(PythonDevice):
        def rkey_unpack(self, rkey, payload, raw):
            super().rkey_unpack(rkey, bytes(payload)[: PAYLOAD.size].ljust(PAYLOAD.size), raw)


@caught_by("test_a_registrations_key_ends_with_it")
class TestDeregLeavesTheKey(Liar):
    class device(PythonDevice):
        def mem_dereg(self, reg):
            self._enter("mem_dereg")


@caught_by("test_leaves_nothing", "test_threads")
class TestKeysLeaveADescriptor(Liar):
    class device(PythonDevice):
        def key_destroy(self, memh, key, done):
            super().key_destroy(memh, key, done)
            self.leaked = [*getattr(self, "leaked", []), os.dup(self.event)]

        def close(self):
            for descriptor in getattr(self, "leaked", []):
                os.close(descriptor)
            super().close()


@caught_by("test_memory_of_which_only_the_address_is_said")
class TestTakesOurMemoryForAGpus(Liar):
    class device(PythonDevice):
        def mem_query(self, address, length):
            return um.MemType.CUDA


@caught_by("test_memory_of_which_only_the_address_is_said")
class TestLooksAndLeavesADescriptor(Liar):
    class device(PythonDevice):
        def mem_query(self, address, length):
            self.leaked = [*getattr(self, "leaked", []), os.dup(self.event)]
            return um.MemType.HOST

        def close(self):
            for descriptor in getattr(self, "leaked", []):
                os.close(descriptor)
            super().close()


@caught_by("test_a_connection_begins_anew")
class TestAnAddressOutlivesTheReset(Liar):
    class device(PythonDevice):
        def ep_reset(self, ep):
            super().ep_reset(ep)
            ep.data.epoch -= 1


@caught_by("test_derives_what_is_asked_for")
class TestAHandleGetsLessThanIsDeclared(Liar):
    class device(PythonDevice):
        def mem_enforcement(self, memh):
            return EnforcementTable(ENFORCED, ENFORCED, EnforcementRow())


@caught_by("test_what_cannot_be_registered")
class TestSaysUnsupportedAndKeepsIt(Liar):
    gauges = ("device.python_keys",)

    class device(PythonDevice):
        def mem_reg(self, reg):
            made = super().mem_reg(reg)
            if reg.address < 4096:
                raise um.UnsupportedError("no such memory")
            return made


@caught_by("test_a_refused_end_is_repeated")
class TestForgetsWhatItCouldNotEnd(Liar):
    class device(PythonDevice):
        def key_destroy(self, memh, key, done):
            if self.faults.get("key_destroy"):
                del self.keys[key.value]
            super().key_destroy(memh, key, done)


@caught_by("test_is_silent")
class TestPrints(Liar):
    class device(PythonDevice):
        def rkey_unpack(self, rkey, payload, raw):
            print("a key!")
            super().rkey_unpack(rkey, payload, raw)


@caught_by("test_progress_and_its_descriptor")
class TestItsDescriptorIsNone(Liar):
    class device(PythonDevice):
        def event_fd(self):
            return 1 << 20


@caught_by("test_round_trip")
class TestOddPutsLoseTheLastByte(Liar):
    class device(PythonDevice):
        def _move(self, op):
            if op.kind is OpKind.PUT and op.length > 1 and op.length % 2:
                kept = bytes(self._look(op.remote_address + op.length - 1, 1))
                super()._move(op)
                self._look(op.remote_address + op.length - 1, 1)[:] = kept
            else:
                super()._move(op)


@caught_by("test_a_key_of_another_memory_leads_there")
class TestGetsTheNewestMemory(Liar):
    """As one that looks keys up by length: found out where many of one length live."""

    class device(PythonDevice):
        def rkey_unpack(self, rkey, payload, raw):
            super().rkey_unpack(rkey, payload, raw)
            same = [row for row in self.keys.values() if row[1] == rkey.length == 4096]
            rkey.data = (*rkey.data, same[-1][0] - rkey.address if len(same) > 4 else 0)

        def _carry_out(self, end, op):
            *data, self.shift = op.rkey.data
            op.rkey.data = tuple(data)
            super()._carry_out(end, op)
            op.rkey.data = (*data, self.shift)

        def _move(self, op):
            if op.kind is OpKind.GET and self.shift:
                op.local[:] = self._look(op.remote_address + self.shift, op.length)
            else:
                super()._move(op)


@caught_by("test_atomics")
class TestASwapThatFailsTellsWhatWasExpected(Liar):
    class device(PythonDevice):
        def _move(self, op):
            super()._move(op)
            if op.kind is OpKind.COMPARE_SWAP:
                op.result = op.compare


@caught_by("test_pointers")
class TestPointsToTheBeginning(Liar):
    class device(PythonDevice):
        def rkey_ptr(self, rkey, address):
            return rkey.address


@caught_by("test_a_key_value_does_not_return_soon")
class TestAValueReturnsAtOnce(Liar):
    stated = dict(quarantine=0)

    class device(PythonDevice):
        def _add_key(self, address, length, rights, end):
            value = next(value for value in count(1) if value not in self.keys)
            self.keys[value] = (address, length, rights, end)
            return value


@caught_by(
    "test_rights_are_kept_as_claimed",
    "test_ranges_are_kept_as_claimed",
)
class TestClaimsWhatNobodyCanTry(Liar):
    """It packs nothing raw: what refuses is the peer's library, and no device."""

    stated = dict(rkey_raw_size=0)


@caught_by("test_threads")
class TestIsNotForThreads(Liar):
    class device(PythonDevice):
        def rkey_unpack(self, rkey, payload, raw):
            self.last = bytes(payload)
            time.sleep(0.001)
            super().rkey_unpack(rkey, self.last, raw)


class Fake(MdSuite):
    """The same on the fake in C, whose lies are its own."""

    wait = 1
    cycles = 10
    stream = 64 << 10
    lies = ()

    @pytest.fixture
    def md(self):
        md, _ = open_fake(lies=self.lies, deferred=True)
        yield md
        md.close(force=True)


@caught_by("test_revocation_stops_what_is_in_flight")
class TestWhatIsInFlightGoesOn(Fake):
    lies = ("in_flight",)


@caught_by("test_numbers_next_to_a_key_are_no_keys", "test_revocation_is_as_claimed")
class TestNumbersNextToAKeyAreKeys(Fake):
    lies = ("guess",)
