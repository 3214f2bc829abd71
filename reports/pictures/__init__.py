"""Pictures: all that is drawn with matplotlib, which no other room of reports needs."""
