"""The texts of all pages and commands: English in `en.json`, Chinese in `zh.json`, looked up with `texts.py`."""
