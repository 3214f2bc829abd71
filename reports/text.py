"""Text from users on its way into a picture or a trace."""


def plain(text: str, length: int = 120) -> str:
    """Return ``text`` on one line, without control characters, cut to ``length`` characters.

    >>> plain("a very long name", 8)
    'a very …'
    """
    words = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return words if len(words) <= length else words[: length - 1] + "…"
