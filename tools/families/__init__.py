"""Compare attention of every model class of transformers with ours, and write the table of results."""
