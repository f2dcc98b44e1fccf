"""What every room stands on: errors in one line, units and metrics, devices, models, progress, text for a terminal.

In: data/devices.toml, data/models.toml, data/vocabulary.toml. Out: facts with unit and source.
Door: `errors.BadInput`, `vocabulary`, `devices.get`, `models.get`, `progress.shown`, `console`.
"""
