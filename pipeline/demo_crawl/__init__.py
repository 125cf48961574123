"""The demo crawl: WARC files with known, labelled content, made of the documentation that is installed anyway.

`build.py` composes it, `harvest.py` finds the text, `layout.py` makes it web pages, `write.py` writes WARC and truth;
each other module plants one sort of case.
"""
