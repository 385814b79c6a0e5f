"""One file for each noun of the HTTP surface."""
