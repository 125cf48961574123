"""Candidates of names: the few places of a text that a language model reads, chosen by cheap features of words.

A named-entity pipeline takes 50 to 80 µs a token, so reading a whole page takes 40 ms. A candidate is a distinct
sequence of capitalized words; it is ranked by the features below, and only the best ones are read, each in a window of
a few words. What is found there counts at every place where the text has the same words.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import regex

CONTEXT_WORDS = 1
"""Words of a window before and after a candidate. With 3 words, recall grew from 0.83 to 0.85 and the time by a half.
"""
CONTEXT_CHARS = 60
"""Maximum length of a window before and after a candidate [characters]."""
MAX_CANDIDATE_CHARS = 80
"""Maximum length of a candidate; a longer one is no name [characters]."""
MAX_SEARCHED = 200_000
"""Maximum length of text that is searched for candidates at once [characters]; a longer one is divided."""
_FIRST_NAMES = """
    aaron abdul abdullah abigail adam adrian agnes ahmed alain alan albert alberto alejandro aleksandr alessandro
    alex alexander alexandra alexandre alexis alfred ali alice alicia alison allan allen amanda amina amit amy ana
    andré andrea andreas andrei andrew andrzej andy angela anita ann anna anne annie anthony antoine anton antonio
    arthur ashley barbara beatrice ben benjamin bernard bernd beth betty bill billy birgit bob boris brad brandon
    brenda brian bruce camille carl carla carlos carmen carol caroline catherine cecilia chad charles charlie
    charlotte chen chloe chris christian christina christine christoph christophe christopher claire clara claude
    claudia colin connor craig cristina cynthia daniel daniela danielle danny darren dave david dean deborah denis
    dennis derek diana diane didier diego dieter dmitri dominic dominique don donald donna dorothy doug douglas
    duncan dylan ed eddie edith eduardo edward elena eleanor elisabeth elizabeth ella ellen emily emma emmanuel
    eric erik ernest ethan eugene eva evelyn fabio fatima felix fernando fiona florian frances francesca francesco
    francis francisco franck françois françoise frank frans fred frederick gabriel gail gareth gary gavin geoff
    geoffrey george georges gerald gérard gilles giovanni giulia giuseppe glenn gloria gordon grace graham greg
    gregory guillaume günter gustavo guy hannah hans harold harry hassan heather heinz helen helena hélène helmut
    henri henry herbert hillary howard hugh hugo ian ibrahim ingrid irene isaac isabel isabelle ivan jack jackie
    jacob jacques jake james jamie jan jane janet jason javier jay jean jeff jeffrey jen jennifer jenny jeremy
    jérôme jerry jesse jessica jessie jill jim jimmy joan joanna joe joel johan johann johannes john johnny jon
    jonathan jordan jorge josé josef joseph josh joshua juan judith judy julia julian julie julien jürgen justin
    karen karim karin karl kate katherine kathleen kathryn kathy katie keith kelly ken kenneth kevin khalid kim
    klaus kristen kurt kyle larry lars laura lauren laurence laurent lawrence leah lee leo leon leonard leslie
    lewis linda lisa liz lori louis louise luc luca lucas lucia lucy luis luke lynn mads magdalena manuel marc
    marcel marco marcus margaret maria marie marina mario marion mark marko markus marta martha martin martine
    mary mathieu matt matteo matthew matthias maurice max maxime megan melanie melissa michael michel michèle
    michelle miguel mike mikhail mohamed mohammad mohammed monica monika muhammad mustafa nancy naomi natalia
    natalie nathalie nathan neil nicholas nick nicola nicolas nicole nigel nikolai nina noah nora norbert norman
    olga oliver olivier oscar otto pablo pamela paolo pascal pat patricia patrick paul paula pauline pavel pedro
    peggy peter petra phil philip philippe phillip pierre piotr rachel rafael rahul raj ralph ray raymond rebecca
    renate ricardo richard rick rita rob robert roberta roberto robin rodney roger roland ron ronald rosa rose
    ross roy ruth ryan sabine sally sam samantha samuel sandra sara sarah scott sean sébastien serge sergei sharon
    sheila shirley silvia simon simone sofia sophie stacy stefan stella stephan stéphane stephanie stephen steve
    steven stuart sue susan susanne suzanne sven sylvia sylvie tanya ted teresa terry theodore theresa thierry
    thomas tim timothy tina todd tom tommy tony tracy ulrich ursula valérie vanessa vera véronique victor victoria
    vincent virginia vladimir walter wang wayne wendy werner will william wolfgang xavier yann yves yvonne yusuf
    zoe
"""
FIRST_NAMES = frozenset(_FIRST_NAMES.split())
"""Frequent first names of several languages, in lower case; an own list of facts, only used to rank candidates."""
_TITLES = """
    mr mrs ms miss dr prof professor sir lady lord dame president minister senator sen rep gov governor judge
    justice captain capt col gen sgt lt officer detective coach chairman ceo director author editor rev father
    sister mayor monsieur madame mme mlle m docteur professeur maître président présidente ministre maire herr
    frau señor señora sr sra don doña signor signora pan pani
"""
TITLES = frozenset(_TITLES.split())
"""Words before the name of a person, in lower case and without a full stop."""
_SPEECH = """
    said says say asked added wrote writes explained noted joined who is was has and also whose dit
    affirme explique déclare raconte ajoute estime précise qui est a et sagte sagt erklärte meinte der die ist und
    dijo dice afirmó quien es disse ha che
"""
SPEECH = frozenset(_SPEECH.split())
"""Words after the name of a person, in lower case."""
_AUTHOR = """
    by par von por di von with says said to and et und y e from with avec mit
"""
AUTHOR = frozenset(_AUTHOR.split())
"""Words before the name of a person that are no titles, in lower case."""
_THINGS = """
    university college school institute hospital center centre inc ltd llc corp company co group bank foundation
    association society council committee department ministry agency office court street road avenue park lake
    river mountain island city county state states kingdom republic church museum library club league cup award
    day week month january february march april may june july august september october november december monday
    tuesday wednesday thursday friday saturday sunday north south east west northern southern eastern western new
    united national international american british english french german european african chinese indian canadian
    australian the this that these those with from for our your their his her my we you they it he she if when
    what why how who where here about after before yesterday today in at on as an there then and but or not no yes
    all some any more most other first second third one two three please click read service services news times
    post journal press media magazine privacy policy terms home page website internet web facebook twitter google
    youtube instagram windows microsoft apple android court act law bill party union parliament université école
    institut hôpital société association conseil ministère rue avenue place parc janvier février mars avril mai
    juin juillet août septembre octobre novembre décembre lundi mardi mercredi jeudi vendredi samedi dimanche les
    des une dans pour avec sur nous vous ils elles cette mais plus tout tous notre votre saint sainte nord sud est
"""
THINGS = frozenset(_THINGS.split())
"""Words that names of persons rarely have, in lower case."""
CASED = r"\p{Lu}\p{Ll}\p{Lt}\p{Lm}\p{M}"
"""Letters of scripts with capitals, for a set of a pattern. Letters of other scripts may be beside a name."""
_WORD = rf"\p{{Lu}}(?:\.|[{CASED}]*+(?:['’-][{CASED}]++)*+)"
_SMALL = r"(?:(?:de|da|do|dos|del|della|di|du|la|le|van|von|der|den|ter|bin|ibn|ben|al|el|y|zu)[ ]){0,2}+"
_NAME = regex.compile(
    rf"(?<![{CASED}\p{{N}}_@./-]){_WORD}(?:[ ]{_SMALL}{_WORD}){{0,4}}+(?![\p{{Nd}}\p{{Nl}}_@]|\.\p{{L}})"
)
# Not the words of addresses, which often have the name of their owner.
_SMALL_WORD = regex.compile(r"(?<![\p{L}\p{N}_@./-])\p{Ll}{2,}+(?![\p{L}\p{N}_@/-]|\.\p{L})")
_HAN = regex.compile(r"\p{Han}")
_CASED = regex.compile(r"\p{Lu}")
_BEFORE = re.compile(r"([^\W\d_]{1,24})\.?[ ]\Z")
_AFTER = re.compile(r"[ ]([^\W\d_]{1,24})")
_SENTENCE_ENDS = frozenset('.!?:;\n•|"“”»«*-–—')
# A Chinese name: a frequent surname and one or two characters, before a title or a verb of speech, or after a title.
_SURNAMES = (
    "王李张劉刘陈陳杨楊黄黃赵趙吴吳周徐孙孫马馬朱胡郭何高林罗羅郑鄭梁谢謝宋唐许許韩韓冯馮邓鄧曹彭曾肖田董袁潘于蒋蔣蔡余杜叶葉程苏蘇魏"
    "吕呂丁任沈姚卢盧姜崔钟鍾谭譚陆陸汪范金石廖贾賈夏韦韋付方白邹鄒孟熊秦邱江尹薛闫阎段雷侯龙龍史陶黎贺賀顾顧毛郝龚龔邵万萬钱錢严嚴"
)
_CHINESE = regex.compile(
    rf"(?:(?<=先生|女士|记者|記者|教授|博士|主席|总统|總統|总理|總理|部长|部長|市长|市長|主任|经理|經理|董事长|院长|作者|导演)"
    rf"[{_SURNAMES}]\p{{Han}}{{1,2}}+)"
    rf"|[{_SURNAMES}]\p{{Han}}{{1,2}}?(?=先生|女士|小姐|教授|博士|老师|老師|医生|醫生|律师|律師|主席|总统|總統|总理|總理|部长|部長"
    rf"|市长|市長|主任|经理|經理|董事长|院长|记者|記者|导演|说|說|表示|认为|認為|指出|告诉|告訴|介绍|强调)"
)
_CHINESE_CONTEXT = 12
"""Characters of a window before and after a Chinese candidate."""

WEIGHTS = {
    "words1": -1.3, "words2": 0.2, "words3": -0.1, "words4": 0.6, "sentence_start": -0.3, "title": 1.7, "author": 0.1,
    "word_before": -0.4, "first_name": 1.6, "first_name_of_several": 1.5, "thing": -1.7, "seen_small": -1.2,
    "capitals": -1.3, "short_end": -0.3, "initial": -0.2, "speech": 0.6, "word_after": -0.2, "comma": 0.4,
    "repeated": 0.3,
}  # fmt: skip
"""Weight of each feature: a logistic regression of what the whole pipelines find on 150 English and 50 French pages."""
BIAS = -0.6
MIN_SCORE, MIN_SCORE_OF_ANY = -2.0, -4.0
"""Minimum score of a candidate to be read: of persons only, and of names of every type, which are single words more
often."""
OF_PERSONS = frozenset(("title", "author", "first_name", "first_name_of_several", "thing", "speech"))
"""Features that count only for names of persons; other names are ranked without them."""


@dataclass(slots=True)
class NameCandidate:
    """A distinct sequence of capitalized words, at the first place where the text has it."""

    text: str
    start: int
    """Offset of its first place in the text [characters]."""
    end: int
    count: int = 1
    """How often the text has it."""
    score: float = 0.0


@dataclass(frozen=True)
class NameCandidates:
    """The candidates of a text in the order of their places, and the words that the text has in lower case."""

    found: list[NameCandidate]
    small_words: frozenset[str]


@dataclass(frozen=True)
class NameWindows:
    """The windows of a text that a pipeline reads, and the words that the text has in lower case."""

    texts: list[str]
    small_words: frozenset[str]


def find_windows(
    text: str, most: int, persons_only: bool = True, small_words: frozenset[str] | None = None
) -> NameWindows:
    """Return at most `most` windows of a text that may hold names, the best first.

    A script without capitals has no candidates: there, Chinese names are searched by their surnames and words beside
    them, and of other such texts the first lines are read. With `persons_only`, names of persons are preferred.
    `small_words` are the words in lower case, if they are known.
    """
    candidates = find_candidates(text, small_words)
    has_chinese = _HAN.search(text, 0, MAX_SEARCHED) is not None
    texts = [*_chinese_windows(text[:MAX_SEARCHED], most)] if has_chinese else []
    best = _best(text, candidates, most - len(texts), persons_only) if len(texts) < most else []
    texts += [_window(text, own) for own in best]
    if not texts and not _CASED.search(text, 0, MAX_SEARCHED):
        texts = [line[:MAX_CANDIDATE_CHARS] for line in text[:MAX_SEARCHED].splitlines() if line.strip()][:most]
    return NameWindows(texts, candidates.small_words)


def small_words_of(text: str) -> frozenset[str]:
    """Return the words that a text has in lower case, but not those of addresses."""
    return frozenset(_SMALL_WORD.findall(text, 0, MAX_SEARCHED))


def find_candidates(text: str, small_words: frozenset[str] | None = None) -> NameCandidates:
    """Return the distinct candidates of a text, without scores. `small_words` are those of the text by default."""
    text = text[:MAX_SEARCHED]
    small = small_words if small_words is not None else small_words_of(text)
    known: dict[str, NameCandidate] = {}
    for match in _NAME.finditer(text):
        start, end = match.span()
        if end - start > MAX_CANDIDATE_CHARS:
            continue
        # A sentence may begin with a common word before a name, as in `Yesterday Anna Smith …`.
        words = match[0].split(" ")
        while len(words) > 1 and (words[0].lower() in small or words[0].lower() in THINGS):
            start += len(words[0]) + 1
            words = words[1:]
        name = text[start:end]
        if len(name) < 2 or name[0].islower():
            continue
        if name in known:
            known[name].count += 1
        else:
            known[name] = NameCandidate(name, start, end)
    return NameCandidates([*known.values()], small)


def features(text: str, name: NameCandidate, small_words: Collection[str]) -> Iterator[str]:
    """Yield the features of a candidate; `small_words` are the words that the text has in lower case."""
    words = name.text.split(" ")
    folded = [word.strip(".").lower() for word in words]
    yield f"words{min(4, len(words))}"
    before = text[max(0, name.start - 24) : name.start]
    match = _BEFORE.search(before)
    previous = match[1].lower() if match else ""
    stripped = before.rstrip(" ")
    if not stripped or (stripped[-1] in _SENTENCE_ENDS and previous not in TITLES):
        yield "sentence_start"
    if previous in TITLES or (folded[0] in TITLES and len(words) > 1):
        yield "title"
    elif previous:
        yield "author" if previous in AUTHOR else "word_before"
    if folded[0].partition("-")[0] in FIRST_NAMES:
        yield "first_name"
        if len(words) > 1:
            yield "first_name_of_several"
    if not THINGS.isdisjoint(folded):
        yield "thing"
    if any(word in small_words for word in folded):
        yield "seen_small"
    if len(words[0]) > 1 and name.text.isupper():
        yield "capitals"
    if len(folded[-1]) < 2:
        yield "short_end"
    if any(len(word) == 1 for word in folded[:-1]):
        yield "initial"
    after = text[name.end : name.end + 25]
    following = _AFTER.match(after)
    if following:
        yield "speech" if following[1] in SPEECH else "word_after"
    elif after[:1] == ",":
        yield "comma"
    if name.count > 1:
        yield "repeated"


def _best(text: str, candidates: NameCandidates, most: int, persons_only: bool) -> list[NameCandidate]:
    """Return the candidates with the highest scores, without the last names of better ones."""
    for own in candidates.found:
        names = features(text, own, candidates.small_words)
        own.score = BIAS + sum(WEIGHTS[name] for name in names if persons_only or name not in OF_PERSONS)
    least = MIN_SCORE if persons_only else MIN_SCORE_OF_ANY
    chosen: list[NameCandidate] = []
    last_names: set[str] = set()
    for own in sorted(candidates.found, key=lambda each: (-each.score, each.start)):
        if own.score < least or len(chosen) == most:
            break
        if own.text not in last_names:
            chosen.append(own)
            last_names.add(own.text.rpartition(" ")[2])
    return chosen


def _window(text: str, name: NameCandidate) -> str:
    """Return a candidate with the words of its line beside it."""
    before = text[max(0, name.start - CONTEXT_CHARS) : name.start].rpartition("\n")[2]
    after = text[name.end : name.end + CONTEXT_CHARS].partition("\n")[0]
    words = CONTEXT_WORDS + 1  # The space beside the candidate separates it from an empty word.
    return " ".join(before.split(" ")[-words:]) + name.text + " ".join(after.split(" ")[:words])


def _chinese_windows(text: str, most: int) -> Iterator[str]:
    """Yield the windows of the distinct Chinese names of a text, at most `most`."""
    seen: set[str] = set()
    for match in _CHINESE.finditer(text):
        if len(seen) == most:
            return
        if match[0] not in seen:
            seen.add(match[0])
            yield text[max(0, match.start() - _CHINESE_CONTEXT) : match.end() + _CHINESE_CONTEXT]
