"""The viewer in a notebook: a widget whose requests travel over the connection to the kernel."""

from multihead.errors.optional import require

require("anywidget", "jinja2", "matplotlib", "starlette", purpose="The view in a notebook", extra="notebook")
