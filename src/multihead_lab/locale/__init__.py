"""The texts of the commands and of the page, in the form of `multihead.locale`."""

STORE = __name__
"""What `multihead.locale.texts.section` takes to read them."""
