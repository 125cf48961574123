"""Training of language models, classifiers and importance weights, and the corpora that they are trained on."""
