"""From a training step to the documents it was made of, and from a document to the steps and checkpoints that saw it.

Both are computed from manifest, plan and skip list; nothing is logged while training.
"""

from train.trace.answer_text import print_documents, print_steps
from train.trace.trace import Appearance, FoundDocument, Trace, documents_of_step, open_trace, steps_of_url

__all__ = [
    "Appearance",
    "FoundDocument",
    "Trace",
    "documents_of_step",
    "open_trace",
    "print_documents",
    "print_steps",
    "steps_of_url",
]
