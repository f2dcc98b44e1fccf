// The timeline and the sorting tables of `lab trace --html`; the data stand in #d as JSON.
const d=JSON.parse(document.getElementById('d').textContent),c=document.getElementById('t'),g=c.getContext('2d');
const said=document.getElementById('s'),lanes=d.lanes.length;let a=0,b=d.span;
function draw(){c.width=c.clientWidth*2;c.height=lanes*44+40;c.style.height=c.height/2+'px';const w=c.width,k=w/(b-a);
g.clearRect(0,0,w,c.height);g.font='22px system-ui';for(const r of d.rows){const x=(r[0]-a)*k,l=Math.max(r[1]*k,1);
if(x+l<0||x>w)continue;g.fillStyle=d.colours[d.kind[r[2]]%d.colours.length];g.fillRect(x,r[3]*44+12,l,28)}
g.fillStyle='#000';d.lanes.forEach((n,i)=>g.fillText(n,4,i*44+10));
g.fillText(a.toFixed(1)+' us',4,c.height-8);g.fillText(b.toFixed(1)+' us',w-220,c.height-8)}
c.onwheel=e=>{e.preventDefault();const t=a+(b-a)*e.offsetX/c.clientWidth,f=e.deltaY>0?1.25:.8;
a=Math.max(0,t-(t-a)*f);b=Math.min(d.span,t+(b-t)*f);draw()};
let from=null;c.onmousedown=e=>{from=[e.offsetX,a,b]};window.onmouseup=()=>{from=null};c.ondblclick=()=>{a=0;b=d.span;draw()};
c.onmousemove=e=>{const t=a+(b-a)*e.offsetX/c.clientWidth;if(from){const m=(from[0]-e.offsetX)/c.clientWidth*(from[2]-from[1]);
a=Math.max(0,from[1]+m);b=Math.min(d.span,a+from[2]-from[1]);draw();return}
const lane=Math.floor((e.offsetY*2-6)/44),r=d.rows.find(r=>r[3]==lane&&t>=r[0]&&t<=r[0]+r[1]);
said.textContent=r?d.names[r[2]]+': '+r[1].toFixed(3)+' us at '+r[0].toFixed(1):''};
for(const h of document.querySelectorAll('th'))h.onclick=()=>{const o=h.closest('table').tBodies[0],i=h.cellIndex;
const v=r=>{const s=r.cells[i].textContent,n=parseFloat(s.replace(/,/g,''));return isNaN(n)?s:n};const up=h.dataset.up!='1';
h.dataset.up=up?'1':'0';[...o.rows].sort((p,q)=>{const x=v(p),y=v(q);return (x<y?-1:x>y?1:0)*(up?1:-1)}).forEach(r=>o.append(r))};
window.onresize=draw;draw();
