"""Every switch of every family at a size that a test can afford: `id: (model, constructor arguments)`.

SMALL has one model of each family: by its name and arguments that make it small. PLAIN are the entries of SWITCHES
that are these models, NANO the models of Weft's own size, one for each of the papers' families.
"""

import weft

CVT = dict(embed_dims=(8, 16, 32), depths=(1, 2, 2), num_heads=(1, 2, 4))
CEIT = dict(embed_dim=32, depth=3, num_heads=2, i2t_channels=8)
CETNET = dict(embed_dim=16, depths=(1, 2, 2, 1), num_heads=(1, 2, 4, 8))
PVT = dict(embed_dims=(8, 16, 24, 32), depths=(1, 2, 1, 2), num_heads=(1, 2, 3, 4), mlp_ratios=(4.0, 2.0, 2.0, 2.0))
CSWIN = dict(embed_dims=(8, 16, 24, 32), depths=(1, 2, 2, 1), num_heads=(2, 4, 2, 4), mlp_ratios=(2.0, 4.0, 2.0, 2.0))
CE_SWIN = dict(embed_dim=16, depths=(1, 2, 2, 1), num_heads=(1, 2, 4, 8), window_size=4)
VT = dict(depths=(1, 1, 1), widths=(8, 16, 32), token_dim=64, channels=64, num_tokens=8, group_width=16, num_heads=4)
VITAE = dict(prm_dims=(8, 8, 16), token_dims=(8, 8, 32), depth=3, num_heads=2, groups=8, rc_drop_rate=0.0)
VITAE_PAPER = dict(class_token=True, global_pool="token", pos_embed="sinusoid", final_norm=True)
T2T_VIT = dict(embed_dim=32, depth=3, num_heads=2, token_dim=8, token_drop_rate=0.0)
SMALL = {  # one model for each family
    "cvt_nano": CVT,
    "ceit_nano": CEIT,
    "vitae_nano": VITAE,
    "vt_resnet_nano": VT,
    "cetnet_nano": CETNET,
    "t2t_vit_7": T2T_VIT,
    "pvt_small": PVT,
    "cswin_tiny": CSWIN,
    "ce_swin_tiny": CE_SWIN,
}

SWITCHES = {
    "cvt": ("cvt_nano", CVT),
    "cvt-no-class-token": ("cvt_nano", dict(**CVT, class_token=False, global_pool="avg")),
    **{f"cvt-pos-{where}": ("cvt_nano", dict(**CVT, pos_embed=where)) for where in ("first", "last", "every")},
    "cvt-patch": ("cvt_nano", dict(**CVT, embed="patch")),
    **{f"cvt-{kind}": ("cvt_nano", dict(**CVT, projection=kind)) for kind in ("avg", "linear")},
    "cvt-mixed-projections": ("cvt_nano", dict(**CVT, projection=("conv", "avg", "linear"))),
    "cvt-kv-stride-1": ("cvt_nano", dict(**CVT, stride_kv=1)),
    "cvt-per-block": ("cvt_nano", dict(**CVT, stride_kv=(2, (1, 2), (2, 1)), mlp_ratio=(4.0, (2.0, 4.0), 2.0))),
    "cvt-gelu": ("cvt_nano", dict(**CVT, act_layer="gelu")),
    **{f"cvt-stem-{stride}": ("cvt_nano", dict(**CVT, stem_stride=stride)) for stride in (1, 2, 4)},
    "ceit": ("ceit_nano", CEIT),
    **{
        f"ceit-i2t-{layers}": ("ceit_nano", dict(**CEIT, i2t_layers=layers, i2t_norm=False, stem_stride=4))
        for layers in ("none", "k7s4", "k5s4", "k3s2+k3s2", "k7s2+maxpool")
    },
    **{
        f"ceit-leff-{kernel}-{'bn' if norm else 'plain'}": (
            "ceit_nano",
            dict(**CEIT, leff_kernel=kernel, leff_norm=norm),
        )
        for kernel in (0, 1, 3, 5)
        for norm in (True, False)
    },
    "ceit-final-gelu": ("ceit_nano", dict(**CEIT, leff_final_act=True)),
    "ceit-no-lca": ("ceit_nano", dict(**CEIT, lca=False)),
    "ceit-avg": ("ceit_nano", dict(**CEIT, global_pool="avg")),
    **{f"ceit-stem-{stride}": ("ceit_nano", dict(**CEIT, stem_stride=stride)) for stride in (1, 2, 4)},
    "cetnet": ("cetnet_nano", CETNET),
    **{f"cetnet-le-{kind}": ("cetnet_nano", dict(**CETNET, le=kind)) for kind in ("pre", "none")},
    **{f"cetnet-{kind}": ("cetnet_nano", dict(**CETNET, embed=kind)) for kind in ("conv", "patch")},
    **{
        f"cetnet-ce-{unit}": ("cetnet_nano", dict(**CETNET, ce_unit=unit))
        for unit in ("mbconv", "ghost", "dense", "shuffle", "resnet", "seresnet")
    },
    **{f"cetnet-ce-{n}-layers": ("cetnet_nano", dict(**CETNET, ce_layers=n, ce_expand=(2, 1))) for n in (1, 3, 7)},
    **{
        f"cetnet-{pattern}": ("cetnet_nano", dict(**CETNET, pattern=pattern))
        for pattern in ("T-T-T-T-T-T-T-T", "C-C-C-C-C-C-C-C", "T-C-T-C-T-C-T-C")
    },
    **{f"cetnet-stem-{stride}": ("cetnet_nano", dict(**CETNET, stem_stride=stride)) for stride in (1, 4)},
    "cetnet-window-7": ("cetnet_nano", dict(**CETNET, window_size=7)),
    "vt": ("vt_resnet_nano", VT),
    **{f"vt-{kind}": ("vt_resnet_nano", dict(**VT, tokenizer=kind)) for kind in ("pooling", "clustering")},
    **{
        f"vt-all-{kind}": ("vt_resnet_nano", dict(**VT, tokenizer=kind, later_tokenizer=kind))
        for kind in ("filter", "pooling", "clustering")
    },
    "vt-carried": ("vt_resnet_nano", dict(**VT, carried_tokens=4)),
    **{f"vt-{kind}-relation": ("vt_resnet_nano", dict(**VT, relation=kind)) for kind in ("graph", "none", "identity")},
    "vt-one-relation": ("vt_resnet_nano", dict(**VT, num_modules=3, num_relations=1)),
    **{f"vt-{which}-projector": ("vt_resnet_nano", dict(**VT, projector=which)) for which in ("every", "none")},
    "vt-one-module": ("vt_resnet_nano", dict(**VT, num_modules=1)),
    **{
        f"vt-bottleneck-{conv}": ("vt_resnet_nano", dict(**VT, block="bottleneck", bottleneck_stride=conv))
        for conv in ("1x1", "3x3")
    },
    **{f"vt-stem-{stride}": ("vt_resnet_nano", dict(**VT, stem_stride=stride)) for stride in (1, 2, 4)},
    "vitae": ("vitae_nano", VITAE),
    "vitae-class-token": ("vitae_nano", dict(**VITAE, class_token=True, global_pool="token")),
    "vitae-sinusoid": ("vitae_nano", dict(**VITAE, pos_embed="sinusoid")),
    "vitae-final-norm": ("vitae_nano", dict(**VITAE, final_norm=True)),
    "vitae-full-rc3": ("vitae_nano", dict(**VITAE, full_rc3=True)),
    "vitae-softmax": ("vitae_nano", dict(**VITAE, rc_attention="softmax")),
    "vitae-paper": ("vitae_nano", dict(**VITAE, **VITAE_PAPER, full_rc3=True, rc_attention="softmax")),
    "vitae-rc-heads": ("vitae_nano", dict(**VITAE, full_rc3=True, rc_attention="softmax", rc_heads=(2, 4, 8))),
    "vitae-embed-dim": ("vitae_nano", dict(**VITAE, embed_dim=48)),
    "vitae-same-dilations": ("vitae_nano", dict(**VITAE, dilations=((1, 2, 3),) * 3)),
    "vitae-soft-split": ("vitae_nano", dict(**VITAE, dilations=((), (), ()), stem_stride=4)),
    "vitae-no-rc-pcm": ("vitae_nano", dict(**VITAE, rc_pcm=False)),
    "vitae-post": ("vitae_nano", dict(**VITAE, nc_pcm="post")),
    "vitae-no-nc-pcm": ("vitae_nano", dict(**VITAE, nc_pcm="none")),
    "vitae-no-bn": ("vitae_nano", dict(**VITAE, nc_pcm_norm=False)),
    "vitae-shallow": ("vitae_nano", dict(**VITAE, nc_pcm_convs=2)),
    **{f"vitae-stem-{stride}": ("vitae_nano", dict(**VITAE, stem_stride=stride)) for stride in (1, 2, 4)},
    "t2t-vit": ("t2t_vit_7", T2T_VIT),
    "t2t-vit-avg": ("t2t_vit_7", dict(**T2T_VIT, global_pool="avg")),
    "t2t-vit-softmax": ("t2t_vit_7", dict(**T2T_VIT, token_attention="softmax")),
    "ce-swin": ("ce_swin_tiny", CE_SWIN),
    "ce-swin-table-5": ("ce_swin_tiny", dict(**CE_SWIN, ce_unit="mbconv", ce_expand=(2, 1), ce_layers=7)),
    "ce-swin-stem-2": ("ce_swin_tiny", dict(**CE_SWIN, stem_stride=2)),
    "cvt-ce": ("cvt_nano", dict(**CVT, embed="ce")),
    "pvt-ce": ("pvt_small", dict(**PVT, embed="ce")),
    "cswin-ce": ("cswin_tiny", dict(**CSWIN, embed="ce")),
    "pvt": ("pvt_small", PVT),
    "pvt-sr": ("pvt_small", dict(**PVT, sr_ratios=(3, 1, 2, 1))),
    "pvt-avg": ("pvt_small", dict(**PVT, global_pool="avg")),
    "cswin": ("cswin_tiny", CSWIN),
    "cswin-split": ("cswin_tiny", dict(**CSWIN, split_sizes=(3, 0, 12, 2))),
}

PLAIN = [key for key, (name, args) in SWITCHES.items() if args is SMALL[name]]
NANO = weft.list_models("*_nano")
