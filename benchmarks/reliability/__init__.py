"""Kills, bit flips, full disks, two writers and NaN: attacks on the records of a run."""
