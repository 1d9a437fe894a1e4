"""The errors a user can cause.

The command line prints these as one line and exits with code 2. Anything else that propagates is a
bug in wavetune. What a candidate kernel does wrong is never an exception: it is an `Outcome`.
"""

from __future__ import annotations


class TunerError(Exception):
    """A user's mistake. The message states the rule, the value that broke it and the next action."""


class SpecError(TunerError):
    """A problem spec breaks one or more rules; `str()` has a `file:line:column: path: rule` each."""


class TemplateError(TunerError):
    """A kernel template folder is malformed, or does not render."""


class ToolchainError(TunerError):
    """No usable compiler for a target, or the compiler itself is broken."""


class DeviceError(TunerError):
    """A device is missing, or its runtime reports a failure that is no candidate's fault."""


class StoreError(TunerError):
    """The results database cannot be opened, read or written."""


class LibraryError(TunerError):
    """An exported library is damaged, foreign or made for another device."""
