"""Every error this package raises, as a tree.

::

    CacheGenError
    ├── ConfigError                  a setting is wrong (also a ValueError); names the field
    ├── ModelError
    │   ├── ModelLoadError           the model file is missing, unreadable or not a model
    │   ├── ContextOverflowError     documents and question do not fit the context (also a ValueError)
    │   └── SpliceRefusedError       this model or engine cannot be spliced safely; says why
    ├── CodecError
    │   ├── UnknownLevelError        the profile has no such level (also a ValueError)
    │   ├── EncodeError              the KV cannot be encoded: shape, NaN, infinity (also a ValueError)
    │   ├── ProfileError             a profile is malformed or belongs to another model
    │   └── KernelUnavailableError   the kernel asked for cannot run here (no GPU, no triton)
    ├── BitstreamError               stored bytes cannot be trusted or understood
    │   ├── TruncatedBitstreamError  fewer bytes than the header promises
    │   ├── CorruptBitstreamError    a checksum or an invariant does not hold
    │   ├── UnsupportedVersionError  written by a newer format version
    │   └── FingerprintMismatchError made by another model, tokenizer, profile or layout
    ├── StoreError
    │   ├── StoreUnavailableError    the store cannot be reached, opened or written
    │   ├── StoreFullError           no room is left for the object
    │   ├── StoreFormatError         the store was written by a newer version of this package
    │   └── DeadlineExceededError    the deadline passed before the object arrived (also a TimeoutError)
    ├── RequestCancelledError        the caller gave the request up
    └── MissingDependencyError       an optional extra is not installed (also an ImportError); names the extra

Errors about stored bytes (``BitstreamError``, ``StoreError``) never reach the caller of a request:
the cache turns them into a counted miss with the error's text as its reason, and answers from the text.
"""

from __future__ import annotations


class CacheGenError(Exception):
    """Base of every error raised by this package."""


class ConfigError(CacheGenError, ValueError):
    """A setting is wrong; the message names the field, the value and what is accepted."""


class ModelError(CacheGenError):
    """Base of errors about the model engine."""


class ModelLoadError(ModelError):
    """The model file is missing, unreadable or not a model."""


class ContextOverflowError(ModelError, ValueError):
    """The prompt does not fit the context; the message names both numbers of tokens."""


class SpliceRefusedError(ModelError):
    """This model or engine cannot be spliced safely; the message says why."""


class CodecError(CacheGenError):
    """Base of errors about encoding and decoding."""


class UnknownLevelError(CodecError, ValueError):
    """The profile has no such level; the message lists the levels it has."""


class EncodeError(CodecError, ValueError):
    """The KV cannot be encoded: wrong shape, NaN or infinity."""


class ProfileError(CodecError):
    """A profile is malformed or belongs to another model."""


class KernelUnavailableError(CodecError):
    """The kernel asked for cannot run here."""


class BitstreamError(CacheGenError):
    """Base of errors about stored bytes that cannot be trusted or understood."""


class TruncatedBitstreamError(BitstreamError):
    """There are fewer bytes than the header promises."""


class CorruptBitstreamError(BitstreamError):
    """A checksum or an invariant of the format does not hold."""


class UnsupportedVersionError(BitstreamError):
    """The bytes were written by a newer format version."""


class FingerprintMismatchError(BitstreamError):
    """The bytes were made by another model, tokenizer, profile or layout."""


class StoreError(CacheGenError):
    """Base of errors about stores."""


class StoreUnavailableError(StoreError):
    """The store cannot be reached, opened or written."""


class StoreFullError(StoreError):
    """No room is left for the object."""


class StoreFormatError(StoreError):
    """The store was written by a newer version of this package."""


class DeadlineExceededError(StoreError, TimeoutError):
    """The deadline passed before the object arrived."""


class RequestCancelledError(CacheGenError):
    """The caller gave the request up; the model is free again."""


class MissingDependencyError(CacheGenError, ImportError):
    """An optional extra is not installed; the message names the command that installs it."""
