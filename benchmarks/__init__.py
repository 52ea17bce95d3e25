"""Speed against peers, measured side by side: same weights, same input, same threads, outputs compared first.

Each script prints a table and, with ``--save``, writes a dated JSON into ``benchmarks/results``.
"""
