"""Place a time: the floor that flops, bytes and a device's peaks allow, and the ceilings measured on the device.

In: cost of a workload, a device, ceiling rows. Out: floor in us, share of the roofline, "suspect".
Door: `roofline.place`, `roofline.roofline_fraction`, `ceilings.latest`, `ceilings.suspect`.
"""
