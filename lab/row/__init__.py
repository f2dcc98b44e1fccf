"""Rows: every record that is kept on the disk, as a type, append-only under profiles/<device>/<phase>/<run>/.

In: what a measurement yields. Out: JSON lines that survive a kill at any moment, and the same records read back.
Door: `records.Measurement`, `Ceiling`, `Counter`, `CrossCheck`; `store.append_all`, `store.rows`, `store.kept`.
"""
