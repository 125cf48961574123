"""Pages that are made to be dropped for, or to replace, another page, which they do not resemble."""

import random

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import xxhash

from jobs.recipe import read_values
from pipeline.dedup.config import DedupConfig, RepeatsConfig
from pipeline.dedup.repeats.units import units_of
from pipeline.dedup.verify import make_comparison
from pipeline.minhash import fast
from pipeline.minhash.permutations import draw_odd_numbers, mix_bits
from pipeline.minhash.stage import SignatureConfig, jaccard, shingle_hashes, signature
from pipeline.text.words import normal_words, word_keys

PUBLIC = SignatureConfig(numbers="kept")
BEATEN = 88
"""Number of values of the victim's signature that the crafted page has: 11 of 14 bands."""


def words(seed: int, number: int) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=7)) for _ in range(number)]


VICTIM = " ".join(words(1, 1000))


def crafted(victim: str, config: SignatureConfig) -> str:
    """A page with the shingles of the victim that give the first BEATEN values, and others that give none of them."""
    factors = np.asarray(fast._factors(config.seed, config.permutations), np.uint32).ravel()[:BEATEN, None]
    odd = draw_odd_numbers(config.seed, "shingle", 5)
    own = normal_words(victim, True)
    key = {word: word_keys([word])[0] for word in (*own, *words(2, 400))}

    def values(of: list[str]) -> npt.NDArray[np.uint32]:
        keys = np.array([key[word] for word in of], np.uint64)
        hashes = (mix_bits(np.correlate(keys, odd, "valid")) >> np.uint64(32)).astype(np.uint32)
        return (factors * hashes[None, :]).astype(np.uint32)

    least, draw = values(own).min(axis=1), random.Random(3)
    page: list[str] = []

    def extended(number: int) -> list[str]:
        """The page with further words whose shingles are no minimum."""
        longer = list(page)
        while len(longer) < len(page) + number:
            tried = next(
                word
                for word in (draw.choice(list(key)) for _ in range(10_000))
                if len(longer) < 4 or (values([*longer[-4:], word]).min(axis=1) >= least).all()
            )
            longer.append(tried)
        return longer

    for begin in sorted({*values(own).argmin(axis=1).tolist()}):
        shingle = own[begin : begin + 5]
        while True:
            longer = extended(5)
            if (values([*longer[-4:], *shingle]).min(axis=1) >= least).all():
                break
        page = [*longer, *shingle]
    return " ".join(extended(300))


@pytest.fixture(scope="module")
def attacker() -> str:
    return crafted(VICTIM, PUBLIC)


def similarity_by(dedup: DedupConfig, config: SignatureConfig, left: str, right: str) -> float:
    """What deduplication finds; NaN if it does not join the two."""
    pair = [
        shingle_hashes(text, "en", config).tobytes() if dedup.verify == "jaccard" else signature(text, "en", config)
        for text in (left, right)
    ]
    return float(make_comparison(dedup, config)(*(pa.array([payload], pa.binary()) for payload in pair))[0])


def test_an_estimate_with_a_public_seed_is_deceived(attacker: str) -> None:
    shingles = [shingle_hashes(text, "en", PUBLIC) for text in (VICTIM, attacker)]
    assert jaccard(*shingles) < 0.1
    assert similarity_by(DedupConfig(exact="off", verify="estimate"), PUBLIC, VICTIM, attacker) >= 0.7


def test_texts_or_a_seed_of_ones_own_are_not(attacker: str) -> None:
    assert np.isnan(similarity_by(DedupConfig(exact="off", verify="jaccard"), PUBLIC, VICTIM, attacker))
    own = SignatureConfig(numbers="kept", seed=58_411)
    assert np.isnan(similarity_by(DedupConfig(exact="off", verify="estimate"), own, VICTIM, attacker))


@pytest.mark.parametrize("name", ["web", "mixed"])
def test_our_recipes_compare_texts(name: str) -> None:
    assert read_values(name)["dedup"]["verify"] == "jaccard"


SENTENCE = "the river rises in the cold hills and it flows slowly to the sea"
SAME_HASHES = (
    "wismkwyvkkvlkerd xjrztdipytjsgzdr cgnnnxkndjjfcnim vnaqotojlulxqutb wismkwyvkkvlkerd ydvbirppswvvjqak "
    "fzibrhwhgfnvitcn dicfzjrgwyilbcar cobibyjbtwgpejag gtaxfzipjmnodobs tzzesmjcuktohukb cbbdvtclxlgujpea "
    "wismkwyvkkvlkerd tolcalrygpdtsdgm"
)
"""Words with the xxh64 of the words of SENTENCE: inverting that hash takes less than a second a word."""
SAME_LINE = "buy some cheap pills at weuocuyicdsgyike"
"""A line with the xxh64 of SENTENCE."""


def xxh64(text: str) -> int:
    return xxhash.xxh64_intdigest(text.encode())


def test_words_are_not_compared_by_a_hash_that_can_be_inverted() -> None:
    own, forged = SENTENCE.split(), SAME_HASHES.split()
    assert [*map(xxh64, own)] == [*map(xxh64, forged)]
    assert not {*word_keys(own).tolist()} & {*word_keys(forged).tolist()}
    assert jaccard(shingle_hashes(SENTENCE, "en", PUBLIC), shingle_hashes(SAME_HASHES, "en", PUBLIC)) == 0


SHORT = "the old lighthouse keeper walked along the harbour"
SAME_SHINGLES = (
    "qualm zebra jumbo vexed igpobzdgbmifmwxlupytmhbl yhpisfmemntllupqnvxylxsvqsxdwxdnflagw "
    "yqvyriigmirmhcevtqlrjcgyrfsylfgwhcair rlbstsqgvsfxbzoxyphrexocaqzfzosdenbuc"
)
"""A text whose shingles have the xxh64 of those of SHORT: each takes some seconds."""


@pytest.mark.parametrize("seed", [1, 58_411])
def test_the_family_datatrove_is_deceived_for_every_seed_unless_texts_are_compared(seed: int) -> None:
    config = SignatureConfig(family="datatrove", seed=seed)
    assert signature(SHORT, "en", config) == signature(SAME_SHINGLES, "en", config)
    assert similarity_by(DedupConfig(exact="off", verify="estimate"), config, SHORT, SAME_SHINGLES) == 1
    assert np.isnan(similarity_by(DedupConfig(exact="off", verify="jaccard"), config, SHORT, SAME_SHINGLES))


def test_texts_are_compared_by_64_bits_whatever_a_signature_has() -> None:
    config = SignatureConfig(family="datasketch", datasketch_hash="xxh32")
    keys = shingle_hashes(VICTIM, "en", config)
    assert (len(keys), int(keys.min()) >> 32 > 0) == (996, True)


@pytest.mark.parametrize("kind", ["line", "paragraph", "sentences"])
def test_nor_are_lines_paragraphs_and_sentences(kind: str) -> None:
    config = RepeatsConfig(units=[kind], min_unit_chars=1)
    assert xxh64(SENTENCE) == xxh64(SAME_LINE)
    own, forged = (units_of(f"{line}\n" * 3, kind, config).keys for line in (SENTENCE, SAME_LINE))
    assert len(own) == len(forged) > 0
    assert not {*own.tolist()} & {*forged.tolist()}
