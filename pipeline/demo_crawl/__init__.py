"""The demo crawl: WARC files with known, labeled content, made from the documentation of the installed packages.

`build.py` composes the crawl. `text.py` collects the English text, `sentences.py` generates text in other languages
from `sentences.toml`, `html.py` renders pages, and `write.py` writes the WARC files and the truth files. `bad_pages.py`
and `hostile_pages.py` make the planted pages.
"""
