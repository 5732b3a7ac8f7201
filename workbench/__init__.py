"""Tools of the developers: benchmarks, fault simulation, peers. Not part of the wheel."""
