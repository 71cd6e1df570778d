"""The texts of the commands and of the page, in the form of `multihead.locale`."""

LOCALE_PACKAGE = __name__
"""What `multihead.locale.texts.section` takes to read them."""
