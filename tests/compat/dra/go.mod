// Only marks the module's root: each version names its own -modfile.
module dra

go 1.26
