"""Text and pages from rows: writeups, the board, the site, tables of README and NOTES, what notebooks show.

In: cards and judgements. Out: Markdown, HTML, tables; nothing is phrased by hand that a row could say.
Door: `writeup.write`, `writeup.board`, `listing.listing`, `notes.written`, `site.verdicts`, `notebook`, `pairing`.
"""
