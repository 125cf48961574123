"""The trace: the documents of an optimizer step, and the steps and checkpoints that saw a document.

Both are computed from manifest, plan and skip list; training logs nothing for it.
"""

from train.trace.trace import Appearance, FoundDocument, Trace, documents_of_step, open_trace, steps_of_url

__all__ = [
    "Appearance",
    "FoundDocument",
    "Trace",
    "documents_of_step",
    "open_trace",
    "steps_of_url",
]
