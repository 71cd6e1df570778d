"""Compare attention of every model class of transformers with ours, and write the table of results."""

from tools.families.packages import declare_operators

declare_operators()
