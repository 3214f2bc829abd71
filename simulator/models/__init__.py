"""Model families: their sizes, and builders of their operator graphs."""
