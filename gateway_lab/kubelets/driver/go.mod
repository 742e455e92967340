// Only marks the module's root: every build names its own -modfile=mods/k1.N.mod.
module kubelet

go 1.26
