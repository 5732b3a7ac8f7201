"""What a router does for the lanes it owns.

owner.py        answers for every request of one lane: which job is next
procedures.py   the jobs, step by step: assign, restart, verify
endings.py      how a request ends
resumption.py   whether an answer that broke off can go on
places.py       which workers have room, and who waits for one
scan.py         looks up in the log what was asked and what was shown
deaths.py       finds out which workers are dead
context.py      what all of these share
"""
