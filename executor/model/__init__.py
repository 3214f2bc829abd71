"""The transformer that is trained, whole or in the blocks of a stage."""
