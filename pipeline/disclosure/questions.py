"""The questions that only a person can answer, by the name of their answer in the facts file.

The sections are those of the template of the AI Office for the public summary of training content (C(2025) 8311), and
the letters of fields those of the public metrics by which such summaries are scored: see `score.py`.
"""

from dataclasses import dataclass

TEXT, YES_NO, DATE, LIST = "text", "yes or no", "date", "list"
NOT_APPLICABLE = "not applicable"
KINDS = ("public", "licensed", "private", "crawled", "user", "synthetic", "other")
"""What a source can be: sections 2.1, 2.2.1, 2.2.2, 2.3, 2.4, 2.5 and 2.6 of the template."""


@dataclass(frozen=True)
class Question:
    """A fact that no file of a run has."""

    key: str
    """`section.name` in the facts file."""
    field: str
    """The field of the template, such as 1.1.a."""
    text: str
    """The question."""
    kind: str = TEXT
    """The type of the answer: TEXT, YES_NO, DATE (YYYY-MM-DD) or LIST (of texts)."""
    when: str = ""
    """`yes:KEY`: it is only asked if that answer is yes; `kind:KIND`: only if a source is of this kind."""
    optional: bool = False
    """True: the template marks the field as optional, so that a missing answer is no failure."""


Q = Question
QUESTIONS: tuple[Question, ...] = (
    Q("document.updated", "0.b", "Date of the last update of this summary", DATE),
    Q("document.previous", "0.a", "Links to earlier versions of this summary", LIST),
    Q("document.location", "0.a", "Link to the place where this summary is published"),
    Q("document.notices", "0.a", "Where updates of this summary are announced", optional=True),
    Q("provider.name", "1.1.a", "Name of the provider, as a legal entity"),
    Q("provider.contact", "1.1.a", "Contact point of the provider for questions about this summary"),
    Q("representative.name", "1.1.b", "Name of the authorised representative in the Union"),
    Q("representative.contact", "1.1.b", "Contact point of the authorised representative"),
    Q("model.names", "1.2.a", "Versioned names of the models that this summary describes", LIST),
    Q("model.links", "1.2.a", "Links to public documentation of these models", LIST),
    Q("model.base_models", "1.2.b", "Models that were trained further to make these models", LIST),
    Q("model.base_summaries", "1.2.b", "Links to the summaries of those models", LIST),
    Q("model.placed_on_market", "1.2.c", "Date on which the model was placed on the Union market", DATE),
    Q("model.licence", "Model card", "Licence of the weights of the model, such as apache-2.0 or its link"),
    Q("model.uses", "Model card", "What the model is meant for, and what it is not meant for"),
    Q("model.limits", "Model card", "Known limits of the model, besides those of its data", optional=True),
    Q("content.types", "1.3.c", "Types of content of the text, such as fiction, news or scientific text"),
    Q("content.continuous_training", "1.3.d", "Is the model trained on new data after the date above?", YES_NO),
    Q("content.regions", "1.3.f", "National or regional characteristics of the training data"),
    Q("content.demography", "1.3.f", "Demographic characteristics of the training data"),
    Q("content.comments", "1.3.g", "Other comments on the training data", optional=True),
    Q("public.comments", "2.1.e", "Comments on public datasets", optional=True, when="kind:public"),
    Q("licensed.agreements", "2.2.1.a", "Were commercial licence agreements with rightsholders concluded?", YES_NO),
    Q("private.obtained", "2.2.2.a", "Were other private datasets obtained from third parties?", YES_NO),
    Q("private.datasets", "2.2.2.c", "Private datasets that are publicly known, with version and link", LIST,
      "yes:private.obtained"),
    Q("private.description", "2.2.2.d", "Description of private datasets that are not publicly known",
      when="yes:private.obtained"),
    Q("private.comments", "2.2.2.e", "Period of collection and size of private datasets", when="yes:private.obtained",
      optional=True),
    Q("crawler.names", "2.3.b", "Names of the crawlers, as in their user agent", LIST, "kind:crawled"),
    Q("crawler.purposes", "2.3.c", "Purposes of each crawler", when="kind:crawled"),
    Q("crawler.captchas", "2.3.d", "How the crawlers treat captchas", when="kind:crawled"),
    Q("crawler.passwords", "2.3.d", "How the crawlers treat pages behind passwords", when="kind:crawled"),
    Q("crawler.paywalls", "2.3.d", "How the crawlers treat paywalls", when="kind:crawled"),
    Q("crawler.robots_txt", "2.3.d", "How the crawlers respect robots.txt", when="kind:crawled"),
    Q("crawler.protocols", "2.3.d", "Other reservations of rights that the crawlers respect", when="kind:crawled"),
    Q("crawler.regions", "2.3.f", "Geography of the crawled content", when="kind:crawled"),
    Q("crawler.demography", "2.3.f", "Demographic characteristics of the crawled content", when="kind:crawled"),
    Q("crawler.site_types", "2.3.f", "Types of the crawled sites", when="kind:crawled"),
    Q("crawler.comments", "2.3.i", "Other comments on crawled data", when="kind:crawled", optional=True),
    Q("user.interactions", "2.4.a", "Were interactions of users with the model used for training?", YES_NO),
    Q("user.other_services", "2.4.b", "Were data of users of other services of the provider used?", YES_NO),
    Q("user.services", "2.4.c", "These services", LIST, "yes:user.other_services"),
    Q("user.comments", "2.4.e", "Comments on data of users", optional=True, when="kind:user"),
    Q("synthetic.created", "2.5.a", "Were synthetic data created by the provider, or on its behalf?", YES_NO),
    Q("synthetic.models", "2.5.c", "General-purpose models on the market that generated them, with summaries", LIST,
      "yes:synthetic.created"),
    Q("synthetic.other_models", "2.5.d", "Other models that generated them, and the data of these models",
      when="yes:synthetic.created"),
    Q("synthetic.comments", "2.5.e", "Comments on synthetic data", optional=True, when="yes:synthetic.created"),
    Q("other.used", "2.6.a", "Were sources of other kinds used?", YES_NO),
    Q("other.description", "2.6.b", "Description of these sources and their data", when="yes:other.used"),
    Q("other.comments", "2.6.c", "Comments on other sources", optional=True, when="yes:other.used"),
    Q("rights.code_of_practice", "3.1.a", "Has the provider signed the Code of Practice for general-purpose models?",
      YES_NO),
    Q("rights.robots_txt", "3.1.b", "How robots.txt was respected before and during collection"),
    Q("rights.datasets", "3.1.b", "How opt-outs in datasets of third parties were respected"),
    Q("rights.requests", "3.1.b", "How later requests of rightsholders are met"),
    Q("rights.copyright_policy", "3.1.c", "Summary of the copyright policy, or its link", optional=True),
    Q("illegal.measures", "3.2.a", "Measures against content that is illegal under Union law"),
    Q("processing.other", "3.3.a", "Other information on the processing of data", optional=True),
    Q("dataset.name", "Croissant", "Name of the dataset"),
    Q("dataset.licence", "Croissant", "Licence of the dataset as a whole, such as CC-BY-4.0 or its link"),
    Q("dataset.link", "Croissant", "Link to the place where the dataset is described"),
    Q("ab2013.owners", "AB 2013 (1)", "Owners or licensors of the datasets"),
    Q("ab2013.purpose", "AB 2013 (2)", "How the datasets further the intended purpose of the model"),
    Q("ab2013.protected", "AB 2013 (5)", "Whether the datasets hold data under copyright, trademark or patent"),
    Q("ab2013.licensed", "AB 2013 (6)", "Were datasets purchased or licensed?", YES_NO),
    Q("ab2013.personal", "AB 2013 (7)", "Whether the datasets hold personal information, as in Civil Code 1798.140(v)"),
    Q("ab2013.first_used", "AB 2013 (11)", "Date on which the datasets were first used in development", DATE),
    Q("ab2013.aggregate", "AB 2013 (8)",
      "Whether they hold aggregate consumer information, as in Civil Code 1798.140(b)"),
)  # fmt: skip
SOURCE_QUESTIONS: tuple[Question, ...] = (
    Q("kind", "2", f"What the source is: {', '.join(KINDS)}"),
    Q("title", "2.1.c", "Name of the dataset", when="kind:public"),
    Q("link", "2.1.c", "Link to the dataset", when="kind:public"),
    Q("version", "2.1.c", "Version of the dataset", when="kind:public"),
    Q("selection", "2.1.c", "How a part of the dataset was selected", when="kind:public"),
    Q("content", "2.1.d", "Nature of the content", when="kind:public"),
)
"""What is asked for each source of the recipe, in the facts file below `[sources.NAME]`."""
