"""The transformer that ranks train: the whole model, or the blocks of one stage."""
