# SPDX-License-Identifier: BSD-3-Clause
"""Several domains as one: the same memory registered with each, one block with all their keys.

A thin layer over `Md`, `Memh` and `Rkey`; the block of bytes is the one that C's bundle_pack makes.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

from ucx_memh.core import (
    BUNDLE_MAX,
    Endpoint,
    Md,
    Memh,
    Rkey,
    bundle_pack,
    bundle_pack_into,
    bundle_unpack,
)
from ucx_memh.errors import InvalidParamError, MemhError, RevokedError
from ucx_memh.flags import MemFlag, MemhState, PackFlag

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Bundle", "BundleMemh", "BundleRkey"]

T = TypeVar("T")


class Bundle:
    """One registration over several domains.

    `policy` says what a set of registrations (and of derived handles, and of unpacked keys) must
    achieve.  "any": at least one of the domains; `failures` of what is returned has the others'
    reasons.  "all": each of them, else nothing stays and the first reason is raised.  The domains
    stay the caller's, who closes them.  Any thread may call any method.
    """

    def __init__(self, mds: Iterable[Md], policy: str = "any") -> None:
        self.mds = tuple(mds)
        self.policy = policy
        if not all(isinstance(md, Md) for md in self.mds):
            raise TypeError("a Bundle is made of Md objects")
        if not 0 < len(self.mds) <= BUNDLE_MAX or len(set(map(id, self.mds))) != len(self.mds):
            raise InvalidParamError(f"1 to {BUNDLE_MAX} domains, each once", op="Bundle")
        if policy not in ("any", "all"):
            raise InvalidParamError(f'policy is "any" or "all", not {policy!r}', op="Bundle")

    def __repr__(self) -> str:
        return f"<Bundle {self.policy} of {', '.join(md.attr.component for md in self.mds)}>"

    def mem_reg(self, buffer: "Buffer", flags: MemFlag | int | None = None) -> "BundleMemh":
        """Register a buffer with each domain (Md.mem_reg); a base in each that took it.

        `flags` None: what the memory and each domain allow.  Raises what Md.mem_reg raises.
        """
        return self._memhs({md: partial(md.mem_reg, buffer, flags) for md in self.mds})

    def rkey_unpack(self, block: "Buffer") -> "BundleRkey":
        """Unpack a block that BundleMemh.mkey_pack (or C's bundle_pack) made.

        Parts that no domain here knows are skipped.  Raises UnreachableError or a part's own
        reason (policy "any": if no part could be unpacked), MalformedKeyError, KeyVersionError.
        """
        rkeys, failures = {}, {}
        for md, found in zip(self.mds, bundle_unpack(list(self.mds), block), strict=True):
            if isinstance(found, MemhError):
                failures[md] = found
            else:
                rkeys[md] = found
        if failures and self.policy == "all":
            for rkey in rkeys.values():
                rkey.close()
            raise _first(failures)
        return BundleRkey(rkeys, failures)

    def _memhs(self, makers: Mapping[Md, Callable[[], Memh]]) -> "BundleMemh":
        """Make what can be made, as the policy wants it."""
        memhs: dict[Md, Memh] = {}
        failures: dict[Md, MemhError] = {}
        try:
            for md, make in makers.items():
                try:
                    memhs[md] = make()
                except MemhError as error:
                    failures[md] = error.with_traceback(None)  # it would hold our frames
                    if self.policy == "all":
                        break
        except BaseException:  # not of a domain: a signal, say
            _each(memhs, Memh.dereg)
            raise
        if failures and (self.policy == "all" or not memhs):
            _each(memhs, Memh.dereg)  # one that resists: its object tries again when it goes
            raise _first(failures)
        return BundleMemh(self, memhs, failures)


class BundleMemh:
    """A handle in each domain of a bundle: `memhs` {md: Memh}; `failures` {md: why there is none}.

    Each handle may also be used alone.  Any thread may call any method.
    """

    def __init__(
        self, bundle: Bundle, memhs: dict[Md, Memh], failures: dict[Md, MemhError]
    ) -> None:
        self.bundle = bundle
        self.memhs = memhs
        self.failures = failures

    def __repr__(self) -> str:
        parts = (f"{md.attr.component} {memh.state.name}" for md, memh in self.memhs.items())
        return f"<BundleMemh {', '.join(parts)}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.dereg()

    def derive(
        self,
        offset: int = 0,
        length: int | None = None,
        flags: MemFlag | int | None = None,
        endpoints: Mapping[Md, Endpoint] | None = None,
    ) -> "BundleMemh":
        """Derive in each domain (Memh.derive), as the bundle's policy wants it.

        `endpoints` has, for each domain that is to bind the new keys to one, its endpoint.  A
        domain that cannot derive is in `failures` of the result, and no key of it in its block.
        """
        chosen = endpoints or {}
        return self.bundle._memhs(
            {
                md: partial(memh.derive, offset, length, flags, chosen.get(md))
                for md, memh in self.memhs.items()
            }
        )

    def mkey_pack(self, flags: PackFlag | int = 0) -> bytes:
        """One block with the packed key of each handle.

        Whatever the policy: raises what Memh.mkey_pack raises if one of them cannot be packed.
        """
        return bundle_pack(list(self.memhs.values()), flags)

    def mkey_pack_into(self, buffer: "Buffer", flags: PackFlag | int = 0) -> int:
        """Like mkey_pack, into a writable buffer; returns the number of bytes.

        Raises InvalidParamError (status BUFFER_TOO_SMALL), having written nothing, if it is too
        short.
        """
        return bundle_pack_into(list(self.memhs.values()), buffer, flags)

    def invalidate(self, cascade: bool = False) -> None:
        """Destroy the handles' own keys (Memh.invalidate); returns when no key of them works.

        Every handle is tried, whatever becomes of the others.  Then the first error is raised,
        with a note for each other one; what has been revoked stays revoked.  Calling it again goes
        on with those that are not.  RevokedError: there are none.
        """
        left = {md: m for md, m in self.memhs.items() if m.state < MemhState.REVOKED}
        if not left:
            raise RevokedError("all of them were revoked already", op="invalidate")
        _raise_first(_each(left, lambda memh: memh.invalidate(cascade=cascade)))

    def dereg(self, invalidate: bool = False, cascade: bool = False) -> None:
        """Close the handles (Memh.dereg); again: nothing.

        As with invalidate() every handle is tried, then the first error is raised, and calling it
        again goes on with those that are not closed.
        """
        _raise_first(
            _each(self.memhs, lambda memh: memh.dereg(invalidate=invalidate, cascade=cascade))
        )


class BundleRkey:
    """What a peer made of a block: `rkeys` {md: Rkey}; `failures` {md: why there is none}."""

    def __init__(self, rkeys: dict[Md, Rkey], failures: dict[Md, MemhError]) -> None:
        self.rkeys = rkeys
        self.failures = failures

    def __repr__(self) -> str:
        return f"<BundleRkey {', '.join(md.attr.component for md in self.rkeys)}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Give all keys back; legal while operations that use them are under way."""
        for rkey in self.rkeys.values():
            rkey.close()


def _each(things: Mapping[Md, T], act: Callable[[T], object]) -> dict[Md, MemhError]:
    """Do it to all; the errors of those that refuse."""
    failures = {}
    for md, thing in things.items():
        try:
            act(thing)
        except MemhError as error:
            failures[md] = error
    return failures


def _first(failures: Mapping[Md, MemhError]) -> MemhError:
    """The first error, with a note for each other one."""
    error, *others = failures.values()
    for other in others:
        error.add_note(f"and {other}")
    return error


def _raise_first(failures: Mapping[Md, MemhError]) -> None:
    if failures:
        raise _first(failures)
