"""Model families: the built-in decoder and the models of transformers."""
