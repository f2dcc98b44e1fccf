"""Rival libraries, one file each: what a user may have installed instead, timed beside ours and never routed to."""
