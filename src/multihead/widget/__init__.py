"""The viewer in a notebook: a widget whose requests travel over the connection to the kernel."""
