"""The settings of signatures: what a shingle is, which family signs it, and how long a signature is."""

from typing import Literal

from pydantic import Field, model_validator

from schemas.config import Section

MAX_RANDOM_STATE = 2**32 - 1
_RANDOM_STATE = ("datasketch", "datatrove")


class SignatureConfig(Section):
    """How documents are signed; the defaults are datatrove's and FineWeb's. How signatures are compared is for
    deduplication to say."""

    family: Literal["fast", "datasketch", "datatrove", "simhash"] = "fast"
    """Which kind of signature. MinHash: `fast` is ours [uint32 a permutation]; `datasketch` gives that library's hash
    values bit for bit [uint32]; `datatrove` that library's bands, on English text [uint64]. `simhash`: 64 bits in all.
    Signatures of two families cannot be compared."""
    unit: Literal["auto", "words", "chars"] = "auto"
    """What a shingle is made of: normal words, or their characters without the spaces between them; `auto`: characters
    where the language's writing does not separate words (there, `words` are those of a dictionary)."""
    shingle_words: int = Field(5, ge=1)
    """Words of a shingle."""
    shingle_chars: int = Field(5, ge=1)
    """Characters of a shingle."""
    permutations: int = Field(112, ge=2)
    """Length of a MinHash signature [values]."""
    seed: int = 1
    """Seed of the permutations; of `fast` and `simhash` also of the hash of a shingle."""
    datasketch_hash: Literal["sha1", "xxh32"] = "sha1"
    """What `datasketch` hashes a shingle's bytes with: that library's default, or `xxhash.xxh32_intdigest`."""
    datasketch_scheme: Literal["affine32", "legacy"] = "affine32"
    """How `datasketch` permutes a hash: as that library does since 2.0, or as it did before."""

    @model_validator(mode="after")
    def _seed_fits(self) -> "SignatureConfig":
        if self.family in _RANDOM_STATE and not 0 <= self.seed <= MAX_RANDOM_STATE:
            raise ValueError(f"the family {self.family} takes seeds from 0 to {MAX_RANDOM_STATE}, found {self.seed}")
        return self

    @model_validator(mode="after")
    def _is_of_use(self) -> "SignatureConfig":
        unused = {
            "the unit words has no shingle_chars": self.unit == "words" and {"shingle_chars"},
            "the unit chars has no shingle_words": self.unit == "chars" and {"shingle_words"},
            "a SimHash has no permutations": self.family == "simhash" and {"permutations"},
            f"the family {self.family} has no datasketch_hash and no datasketch_scheme": self.family != "datasketch"
            and {"datasketch_hash", "datasketch_scheme"},
        }
        for problem, names in unused.items():
            given = sorted((names or set()) & self.model_fields_set)
            if given:
                raise ValueError(f"{problem}, found {given[0]} = {getattr(self, given[0])!r}; leave it out")
        return self
