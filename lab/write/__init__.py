"""Text and pages from rows: writeups, the board, the site, tables of README and NOTES, what notebooks show.

In: cards and judgements. Out: Markdown, HTML, tables; nothing is phrased by hand that a row could say.
Door: `objects` (the small lab of `lab/__init__`), `figures` (those of a card), `notebook`, `writeup.write`,
`writeup.board`, `listing.measured`, `notes.written`, `readme.written`, `replay.run`, `pairing.write`.
"""
