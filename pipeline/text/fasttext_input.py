"""Text as fastText has to be given it: at a word `</s>`, its mark of the end of a line, it stops to read."""

END_MARK = "</s>"


def readable(text: str) -> str:
    """Return a text that fastText reads to its end. Pages about language models have such words, and so may any page
    that wants to be judged by its first words alone."""
    return text.replace(END_MARK, "<s>")
