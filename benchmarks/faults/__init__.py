"""The fault campaign: processes killed, disks full, files damaged, settings and command lines at random."""
