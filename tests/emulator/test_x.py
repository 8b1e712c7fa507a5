import torch
def test_x(hopper):
    k=hopper[torch.bfloat16]
    for b,h,hd,n in ((32,8,256,512),(32,10,192,512),(32,16,128,512),(32,21,96,512),(32,32,64,512)):
        t=k.tile(hd,n,n,batch=b,heads=h,is_banded=True)
        d=k.deal(b,h,h,n,n,hd,t['block_m'],132,window_right=0,l2_bytes=60<<20)
        print(hd,t['block_m'],[d[d[:,0]==x][:4,1:].tolist() for x in (0,1,5)])
