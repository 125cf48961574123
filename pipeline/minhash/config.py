"""Settings of the section `[signature]`: the family and length of a signature, and the unit and length of shingles."""

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from schemas.config import Section

MAX_RANDOM_STATE = 2**32 - 1
_RANDOM_STATE = ("datasketch", "datatrove")


class SignatureConfig(Section):
    """How signatures are computed. The defaults are those of datatrove and FineWeb. The section `[dedup]` sets how
    signatures are compared. Only the setting `numbers` may differ between sources."""

    OWN_FIELDS: ClassVar = frozenset(("numbers",))

    family: Literal["fast", "datasketch", "datatrove", "simhash"] = "fast"
    """Signature family. MinHash: `fast` is our own, with uint32 values; `datasketch` reproduces the hash values of that
    library bit for bit (uint32); `datatrove` reproduces the bands of that library for English text (uint64). `simhash`
    has a single value of 64 bits. Signatures of two families cannot be compared."""
    unit: Literal["auto", "words", "chars"] = "auto"
    """Unit of a shingle: normalized words, or their characters without the spaces between them. `auto`: characters in
    languages whose writing does not separate words, words in all others. With `words`, a dictionary splits the text of
    such languages into words."""
    shingle_words: int = Field(5, ge=1)
    """Length of a shingle of words [words]."""
    shingle_chars: int = Field(5, ge=1)
    """Length of a shingle of characters [characters]."""
    numbers: Literal["zero", "kept"] = "zero"
    """How numbers count in shingles. `zero`: every number as 0, as in datatrove, so texts that differ in numbers alone
    have equal shingles. `kept`: by their digits. Points and commas then split a number into several words. A source may
    set it for its documents. Between documents of different choices, only shingles without numbers are equal."""
    permutations: int = Field(112, ge=2)
    """Length of a MinHash signature [values]."""
    seed: int = 1
    """Seed of the permutations; with `fast` and `simhash`, also the seed of the shingle hash."""
    datasketch_hash: Literal["sha1", "xxh32"] = "sha1"
    """Hash function of the family `datasketch`: SHA-1, the default of that library, or `xxhash.xxh32_intdigest`."""
    datasketch_scheme: Literal["affine32", "legacy"] = "affine32"
    """Permutation scheme of the family `datasketch`: `affine32`, that library's scheme since version 2.0, or `legacy`,
    its only scheme before."""

    @property
    def keep_numbers(self) -> bool:
        """True if numbers keep their digits in shingles."""
        return self.numbers == "kept"

    def content(self) -> dict[str, Any]:
        """Return the fields that change what is measured and written, as JSON values.

        `numbers` is omitted if it has its default: tables that were built before it existed stay valid.
        """
        return {name: value for name, value in super().content().items() if name != "numbers" or self.keep_numbers}

    @model_validator(mode="after")
    def _seed_fits(self) -> "SignatureConfig":
        if self.family in _RANDOM_STATE and not 0 <= self.seed <= MAX_RANDOM_STATE:
            raise ValueError(
                f"seed: expected 0 to {MAX_RANDOM_STATE} with family {self.family!r}, got {self.seed}. "
                "Set signature.seed to a number in this range."
            )
        return self

    @model_validator(mode="after")
    def _no_unused_settings(self) -> "SignatureConfig":
        unused = (
            ("unit", "words", self.unit == "words", {"shingle_chars"}),
            ("unit", "chars", self.unit == "chars", {"shingle_words"}),
            ("family", "simhash", self.family == "simhash", {"permutations"}),
            ("family", self.family, self.family != "datasketch", {"datasketch_hash", "datasketch_scheme"}),
        )
        for name, value, is_ignored, settings in unused:
            given = sorted(settings & self.model_fields_set)
            if is_ignored and given:
                raise ValueError(
                    f"{given[0]}: expected no value with {name} = {value!r}, which ignores it, got "
                    f"{getattr(self, given[0])!r}. Remove signature.{given[0]}."
                )
        return self
