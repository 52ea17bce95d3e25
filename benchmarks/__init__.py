"""Compare vitral with its peers side by side: same weights, same input, same threads, outputs compared first.

Each script prints a table and, with ``--save``, writes a dated JSON file to ``benchmarks/results``.
"""
