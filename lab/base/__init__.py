"""What every room stands on: errors in one line, data files read as types, units, devices, models, progress, console.

In: data/devices.toml, data/models.toml, data/vocabulary.toml. Out: facts with unit and source.
Door: `errors.BadInput`, `files.read`, `vocabulary`, `devices.get`, `models.get`, `progress.shown`, `console`.
"""
