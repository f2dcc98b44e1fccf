"""Rows: every record that is kept on the disk, append-only under profiles/<device>/<phase>/<run>/.

In: what a measurement yields. Out: JSON lines that survive a kill at any moment, and the same rows read back.
Door: `store.append_all`, `store.read`, `store.rows`, `store.new_run`.
"""
