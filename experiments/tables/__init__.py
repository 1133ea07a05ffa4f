"""Makes the tables of the documents from the result files."""

from ._all import TABLES as TABLES
