"""Jobs that learn from text: language models, classifiers, importance weights, and the corpora they learn from."""
