"""Text as the input of fastText, which reads no further than a word `</s>`, its mark of the end of a line."""

END_MARK = "</s>"


def readable(text: str) -> str:
    """Return a text without the mark, so that fastText reads all of it.

    Pages about language models have the mark, and a page could have it so as to be judged by its first words alone.
    """
    return text.replace(END_MARK, "<s>")
