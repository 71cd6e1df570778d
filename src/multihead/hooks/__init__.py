"""Let other libraries' models call this one's attention: install, translate a call, put everything back."""
